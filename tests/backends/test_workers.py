"""Worker processes: the same bits as in one process, whatever happens to them."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import OneWeight, blobs, mixture, two_quadratics
from helpers.backends import begin
from helpers.runs import Kill, assert_same, data, federation, model
from lightning.fabric.utilities.exceptions import MisconfigurationException

import fedmoe_pl.backends.workers.pool
from fedmoe_pl import Federation, PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import (
    LEAN_TRAINER,
    LocalTraining,
    PoolBackend,
    RayBackend,
    StackedBackend,
    TrainerBackend,
    WorkersBackend,
)
from fedmoe_pl.backends.workers.backend import RemoteWorker, WorkerDied
from fedmoe_pl.backends.workers.pickling import dumps, loads
from fedmoe_pl.backends.workers.worker import Worker
from fedmoe_pl.cli import FederationCLI
from fedmoe_pl.models import LinearGate

REPOSITORY = Path(__file__).parents[2]
CPU = torch.device("cpu")
ONE, TWO = ({"accelerator": "cpu", "devices": devices} for devices in (1, 2))
SIZES = (13, 8, 30, 11)


def training(module=None, datamodule=None, **kwargs) -> LocalTraining:
    module, datamodule = module or model(), datamodule or data(sizes=SIZES)
    datamodule.setup()
    return LocalTraining(
        module=module,
        initial={name: tensor.clone() for name, tensor in module.state_dict().items()},
        algorithm=FedAvg("global_expert.*") if isinstance(module, PersonalizedMoE) else FedAvg(),
        datamodule=datamodule,
        **{"trainer": {**LEAN_TRAINER, "accelerator": "cpu"}, "batch_size": None, "seed": 0, **kwargs},
    )


def trained(backend, training, kept=None) -> list:
    """The groups of a phase's first round."""
    return trained_round(begin(backend, training), kept)


def trained_round(plan, kept=None, round=0) -> list:
    server = plan.training.algorithm.server_init(plan.training.module)
    return list(plan.train(server, list(range(plan.training.datamodule.num_clients)), kept or {}, round))


class InThisProcess(RemoteWorker):
    """A worker in this process, which answers in an order of its own and says what it was sent."""

    def __init__(self, datamodule, log):
        self.worker = Worker(datamodule, CPU)
        self.log = log

    def submit(self, phase, server, group):
        clients, kept, _ = pickle.loads(group)
        self.log.append((phase is not None, server is not None, clients, sorted(kept)))
        future = Future()
        try:
            future.set_result(self.worker.train_group(phase, server, group))
        except Exception as error:
            future.set_exception(error)
        return future

    def result(self, future):
        return future.result()

    def end(self):
        self.log.append("end")


class TwoInThisProcess(WorkersBackend):
    worker = InThisProcess

    def __init__(self, backend=None):
        super().__init__(backend or TrainerBackend())
        self.log = []

    def start(self, datamodule):
        self.datamodule = datamodule
        return [self.worker(datamodule, self.log) for _ in range(2)]

    def replacement(self, worker):
        return self.worker(self.datamodule, self.log)


def test_what_is_sent_is_what_a_worker_has_not_got_largest_groups_first():
    phase, backend = training(), TwoInThisProcess()
    kept = {1: {"local_expert.classifier.1.bias": torch.ones(3)}}
    plan = begin(backend, phase)
    first, second = trained_round(plan, kept), trained_round(plan, round=1)
    other = trained(backend, replace(phase, seed=1))
    assert [entry[2] for entry in backend.log[:4]] == [[2], [0], [3], [1]]
    assert [list(group.kept) for group in first] == [[0], [1], [2], [3]], "yielded in order"
    new_phase, new_round, nothing = (True, True), (False, True), (False, False)
    sent = [new_phase, new_phase, nothing, nothing, new_round, new_round, nothing, nothing]
    assert [entry[:2] for entry in backend.log] == [*sent, new_phase, new_phase, nothing, nothing]
    assert [entry[3] for entry in backend.log[:4]] == [[], [], [], [1]]
    one = begin(TrainerBackend(), phase)
    assert_same(first, trained_round(one, kept))
    assert_same(second, trained_round(one, round=1))
    assert_same(other, trained(TrainerBackend(), replace(phase, seed=1)))


def test_no_update_runs_far_ahead_of_the_first_one_that_is_missing():
    backend = TwoInThisProcess()
    trained(backend, training(datamodule=data(sizes=range(5, 45))))
    assert [entry[2] for entry in backend.log[:2]] == [[15], [14]], "the largest of the first sixteen"


def test_stacked_clients_are_handed_out_in_the_stacks_of_one_process():
    phase = training(mixture(LinearGate(5)), blobs(sizes=SIZES))
    backend = TwoInThisProcess(StackedBackend(clients_per_stack=2))
    plan = begin(backend, phase)
    first, second = trained_round(plan), trained_round(plan, round=1)
    assert [entry[2] for entry in backend.log[:2]] == [[2, 0], [3, 1]]
    one = begin(StackedBackend(clients_per_stack=2), phase)
    assert_same(first, trained_round(one))
    assert_same(second, trained_round(one, round=1))
    assert plan.description == "StackedBackend"


class DiesOnce(InThisProcess):
    deaths = 1

    def submit(self, phase, server, group):
        if pickle.loads(group)[0] == [2] and type(self).deaths:
            type(self).deaths -= 1
            future = Future()
            future.set_exception(WorkerDied("SIGKILL"))
            return future
        return super().submit(phase, server, group)


def test_a_dead_worker_is_replaced_and_its_group_trained_again(monkeypatch):
    phase, backend = training(), TwoInThisProcess()
    backend.worker = DiesOnce
    assert_same(trained(backend, phase), trained(TrainerBackend(), phase))
    assert "end" in backend.log
    assert len(backend.workers) == 2


def test_a_group_that_ends_every_worker_ends_the_run_with_one_sentence(monkeypatch):
    monkeypatch.setattr(DiesOnce, "deaths", 3)
    backend = TwoInThisProcess()
    backend.worker = DiesOnce
    with pytest.raises(
        MisconfigurationException, match=r"client 2 has ended 3 times \(SIGKILL\), probably for lack of"
    ):
        trained(backend, training())


class TwoArgumentsError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Fails(OneWeight):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def training_step(self, batch, batch_idx):
        raise self.error()


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (partial(MisconfigurationException, "the user's own sentence"), MisconfigurationException),
        (partial(TwoArgumentsError, "one", "two"), RuntimeError),
    ],
)
def test_what_training_raises_reaches_the_user(error, raised):
    backend, phase = TwoInThisProcess(), training(Fails(error), two_quadratics())
    with pytest.raises(raised, match=r"sentence|TwoArgumentsError: one and two"):
        trained(backend, phase)
    assert len([entry for entry in backend.log if entry != "end"]) <= 2, "not tried again"


def test_what_cannot_be_sent_is_refused_and_a_lazy_pool_goes_on_without(monkeypatch):
    datamodule = data(sizes=SIZES)
    datamodule.lock = threading.Lock()
    phase = training(datamodule=datamodule)
    with pytest.raises(
        MisconfigurationException, match="devices must be 1 here, because the data module cannot be sent"
    ):
        trained(PoolBackend(TrainerBackend(), [CPU, CPU]), phase)
    monkeypatch.setattr(fedmoe_pl.backends.workers.pool, "_WORTH_STARTING", 0)
    with pytest.warns(UserWarning, match="Training goes on in one process: trainer.devices must be 1"):
        updates = trained(PoolBackend(TrainerBackend(), [CPU, CPU], lazy=True), phase)
    assert_same(updates, trained(TrainerBackend(), phase))


@pytest.mark.parametrize(("rounds", "starts"), [(2, False), (10**6, True)])
def test_a_lazy_pool_starts_only_where_it_shortens_the_phase(rounds, starts, monkeypatch):
    pool, phase, log = PoolBackend(TrainerBackend(), [CPU, CPU], lazy=True), training(rounds=rounds), []
    monkeypatch.setattr(pool, "start", lambda datamodule: [InThisProcess(datamodule, log) for _ in range(2)])
    assert_same(trained(pool, phase), trained(TrainerBackend(), phase))
    assert [entry[2] for entry in log] == ([[2], [3]] if starts else []), "two groups are measured first"


def test_tensors_travel_without_what_they_are_views_of():
    whole = torch.arange(100_000.0)
    tree = {"part": whole[10:20], "half": whole[:4].bfloat16(), "empty": whole[:0], "number": torch.tensor(3)}
    pickled = dumps(tree)
    assert len(pickled) < 3000
    assert_same(loads(pickled), tree)
    loads(pickled)["part"].add_(1)  # it is writable


def test_a_model_of_the_command_line_travels_without_its_configuration(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedmoe"])
    config = str(REPOSITORY / "configs/quickstart.yaml")
    cli = FederationCLI(["partition", "--config", config, "--federation.default_root_dir", str(tmp_path)])
    pickled = dumps(cli.model, cli.datamodule)
    assert len(pickled) < 100_000
    optimizer = loads(pickled).optimizer([torch.nn.Parameter(torch.zeros(1))])
    assert optimizer.defaults["momentum"] == 0.5


def same_runs(one: Federation, other: Federation) -> None:
    assert_same(one.states, other.states)
    for name in ("rounds.csv", "clients.csv", "summary.csv"):
        assert (one.run_dir / name).read_bytes() == (other.run_dir / name).read_bytes()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run in one process that the others are compared with."""
    run = federation(tmp_path_factory.mktemp("alone"), trainer=ONE, backend=TrainerBackend())
    run.fit(model(), data(sizes=SIZES))
    return run


def children() -> set[str]:
    """Command lines of this process's worker processes."""
    listed = subprocess.run(["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return {line for line in listed.stdout.splitlines() if "LokyProcess" in line}


def test_two_workers_give_the_bits_of_one_process_and_are_gone_afterwards(alone, tmp_path):
    run = federation(tmp_path, trainer=TWO, backend=TrainerBackend())
    run.fit(model(), data(sizes=SIZES))
    same_runs(run, alone)
    assert not children()


def test_a_run_stopped_with_workers_goes_on_without(alone, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        federation(tmp_path, trainer=TWO, backend=TrainerBackend(), callbacks=[Kill("on_client_end", 7)]).fit(
            model(), data(sizes=SIZES)
        )
    assert not children()
    resumed = federation(tmp_path, trainer=ONE, backend=TrainerBackend())
    resumed.fit(model(), data(sizes=SIZES), ckpt_path="last")
    same_runs(resumed, alone)


class KillsItsProcess(PersonalizedMoE):
    """Ends its process in the middle of a client's training, where it is a worker and the file is there."""

    def __init__(self, *args, file, **kwargs):
        super().__init__(*args, **kwargs)
        self.file = str(file)
        self.driver = os.getpid()

    def loss(self, batch):
        if os.path.exists(self.file) and os.getpid() != self.driver:
            os.unlink(self.file)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(batch)


def killing_model(file):
    torch.manual_seed(0)
    expert = model().global_expert
    return KillsItsProcess(expert, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5), file=file)


def test_a_killed_process_is_replaced_and_the_bits_stay(alone, tmp_path):
    (tmp_path / "kill").touch()
    run = federation(tmp_path, trainer=TWO, backend=TrainerBackend())
    run.fit(killing_model(tmp_path / "kill"), data(sizes=SIZES))
    assert not (tmp_path / "kill").exists()
    assert_same(run.states["PFL-MF"].kept, alone.states["PFL-MF"].kept)
    assert_same(run.states["FedAvg"].server, alone.states["FedAvg"].server)


def test_an_exception_in_a_process_reaches_the_user_as_itself(tmp_path):
    phase = Phase("FedAvg", FedAvg(), evaluate=False)
    run = federation(tmp_path, [phase], trainer=TWO, backend=TrainerBackend())
    module = Fails(partial(ZeroDivisionError, "in a client"))
    with pytest.raises(ZeroDivisionError, match="in a client"):
        run.fit(module, two_quadratics())
    assert not children()


SCRIPT = """
import os, sys, time
import torch
from fedmoe_pl import Federation, PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.data import Digits

class Expert(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
    def forward(self, x):
        if len(sys.argv) > 3 and os.getpid() != driver:
            print(os.getpid(), flush=True)
            time.sleep(60)
        return super().forward(x.flatten(1))

class MyAverage(FedAvg):
    pass

driver = os.getpid()
torch.manual_seed(0)
federation = Federation(
    [Phase("mine", MyAverage("global_expert.*"), rounds=2)],
    trainer={"accelerator": "cpu", "devices": int(sys.argv[2])},
    logger=False, default_root_dir=sys.argv[1], enable_progress_bar=False,
)
federation.fit(PersonalizedMoE(Expert(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
               Digits(num_clients=3))
"""


@pytest.mark.slow
def test_a_script_needs_no_guard_and_its_classes_travel(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    results = []
    for devices in "12":
        command = [sys.executable, "-W", "error", "-W", "ignore::FutureWarning", "script.py", devices, devices]
        finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stderr
        accuracies = (tmp_path / devices / "federation/version_0/clients.csv").read_bytes()
        results.append((finished.stderr, accuracies))
    assert results[0] == results[1], "the same bits, and nothing more is said"


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_their_driver(tmp_path, how):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", "out", "2", "sleep"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        workers = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(how)
        process.wait(10)
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{worker}").exists() for worker in workers):
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nonsense", "auto"])
def test_a_cluster_that_is_not_there_is_refused_before_anything_is_started(address, tmp_path):
    ray = pytest.importorskip("ray")
    assert not ray.is_initialized()
    with pytest.raises(MisconfigurationException, match=f"RayBackend: address is '{address}', but there is no"):
        federation(tmp_path, backend=RayBackend(address)).fit(model(), data())
    assert not list(tmp_path.rglob("version_*"))


def test_ray_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MisconfigurationException, match=r'pip install "fedmoe-pl\[ray\]"'):
        RayBackend()
    with pytest.raises(MisconfigurationException, match="workers is 0, but must be at least 1"):
        monkeypatch.undo()
        pytest.importorskip("ray")
        RayBackend(workers=0)


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _node_ip_address="127.0.0.1"
    )
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_ray_gives_the_bits_of_one_process_and_replaces_a_killed_one(alone, tmp_path, cluster):
    (tmp_path / "kill").touch()
    run = federation(tmp_path, backend=RayBackend(backend=TrainerBackend()))
    run.fit(killing_model(tmp_path / "kill"), data(sizes=SIZES))
    assert not (tmp_path / "kill").exists()
    assert_same(run.states["PFL-MF"].kept, alone.states["PFL-MF"].kept)
    assert_same(run.states["FedAvg"].server, alone.states["FedAvg"].server)
    assert cluster.is_initialized(), "who started it ends it"


@pytest.mark.slow
def test_an_exception_in_ray_reaches_the_user_as_itself(tmp_path, cluster):
    run = federation(tmp_path, [Phase("FedAvg", FedAvg(), evaluate=False)], backend=RayBackend(workers=1))
    with pytest.raises(ZeroDivisionError, match="in a client"):
        run.fit(Fails(partial(ZeroDivisionError, "in a client")), two_quadratics())
    with pytest.raises(MisconfigurationException, match="workers is 9, but must be at most 2, the number of CPUs"):
        federation(tmp_path, backend=RayBackend(workers=9)).fit(model(), data())
