"""A run goes on with the configuration that it began with, except for what has no influence on its result."""

import json
from decimal import Decimal
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from helpers.runs import Kill, WithDropout, assert_same, data, federation, model
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import PersonalizedMoE, Phase, Select, Train
from fedmoe_pl.algorithms import FedAvg, FedProx, Local
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.checkpoints.checkpoint import load_checkpoint
from fedmoe_pl.checkpoints.configuration import changes, configuration
from fedmoe_pl.models import ConstantGate, LinearGate

SHARED = "global_expert.*"


def phases(algorithm=None, **kwargs) -> list[Phase]:
    """The run stops in the second phase; the third has not begun."""
    settings = {"rounds": 4, "gate": ConstantGate(0.5), "start": "initial", "clients_per_round": 2, **kwargs}
    return [
        Phase("Local", Local(), gate=ConstantGate(0.0)),
        Phase("FedAvg", algorithm or FedAvg(SHARED), **settings),
        Phase("later", FedAvg(SHARED), start="initial", gate=ConstantGate(1.0)),
    ]


def other_model(lr=0.1, momentum=0.5, dropout=0.2):
    torch.manual_seed(0)
    expert = WithDropout()
    expert.classifier[0] = torch.nn.Dropout(dropout)
    return PersonalizedMoE(expert, optimizer=lambda parameters: torch.optim.SGD(parameters, lr, momentum))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    path = tmp_path_factory.mktemp("stopped")
    with pytest.raises(KeyboardInterrupt):
        federation(path, phases(), callbacks=[Kill("on_round_end", 3)]).fit(model(), data())
    return path


FAST = Train(optimizer=partial(torch.optim.SGD, lr=1.0))
OTHER_ORDER = phases()[1::-1] + phases()[2:]
CHANGES = {
    "phases.FedAvg.algorithm was FedAvg, now FedProx": {"phases": phases(FedProx(0.5, SHARED))},
    "phases.FedAvg.algorithm.shared.patterns[0] was global_": {"phases": phases(FedAvg("*.classifier.*"))},
    "phases.FedAvg.gate was ConstantGate, now LinearGate": {"phases": phases(gate=LinearGate(5))},
    "phases.FedAvg.train.optimizer was null, now SGD": {"phases": phases(train=FAST)},
    'phases was ["Local", "FedAvg"], now ["FedAvg", "Local", "later"]': {"phases": OTHER_ORDER},
    "trainer.max_epochs was 1, now 2": {"trainer": {"accelerator": "cpu", "max_epochs": 2}},
    "model.optimizer.lr was 0.1, now 0.2": {"model": other_model(lr=0.2)},
    "model.global_expert.classifier.0.p was 0.2, now 0.3": {"model": other_model(dropout=0.3)},
    "datamodule.batch_size was 4, now 5": {"data": data(batch_size=5)},
}


@pytest.mark.parametrize("sentence", CHANGES)
def test_a_change_on_which_the_result_depends_is_refused(stopped, sentence):
    given = {"phases": phases(), "model": other_model(), "data": data(), **CHANGES[sentence]}
    with pytest.raises(MisconfigurationException) as error:
        own, samples = given.pop("model"), given.pop("data")
        federation(stopped, **given).fit(own, samples, ckpt_path="last")
    message = str(error.value)
    assert f"last.ckpt', a run with another configuration: {sentence}" in message and "\n" not in message
    assert f"; to go on all the same, give allow_changes '{sentence.split(' was ')[0]}" in message


def test_a_listed_change_is_accepted_and_belongs_to_the_run_from_then_on(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        federation(tmp_path, phases(), callbacks=[Kill("on_round_end", 3)]).fit(model(), data())
    with pytest.raises(KeyboardInterrupt):
        again = federation(tmp_path, phases(), callbacks=[Kill("on_round_end", 1)])
        again.fit(other_model(lr=0.2, momentum=0.1), data(), ckpt_path="last", allow_changes="name, model.optimizer")
    with pytest.raises(MisconfigurationException, match=r"model\.optimizer\.lr was 0\.2, now 0\.1"):
        federation(tmp_path, phases()).fit(other_model(lr=0.1, momentum=0.1), data(), ckpt_path="last")
    federation(tmp_path, phases()).fit(other_model(lr=0.2, momentum=0.1), data(), ckpt_path="last")


class Scheduled(FedAvg):
    """Its rounds depend on how many there are in all."""

    needs = ("fixed_rounds",)


def test_more_rounds_are_refused_where_the_rounds_so_far_depend_on_them(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        stopping = federation(tmp_path, phases(Scheduled(SHARED)), callbacks=[Kill("on_round_end", 3)])
        stopping.fit(model(), data())
    more = federation(tmp_path, phases(Scheduled(SHARED), rounds=5))
    with pytest.raises(MisconfigurationException, match=r"phases\.FedAvg\.rounds was 4, now 5; to go on all the same"):
        more.fit(model(), data(), ckpt_path="last")
    more.fit(model(), data(), ckpt_path="last", allow_changes="phases.FedAvg.rounds")
    assert more.run.states["FedAvg"].round == 5


def test_the_rounds_of_a_phase_that_has_ended_early_do_not_change(tmp_path):
    """Later phases count them: they would draw other numbers from then on."""

    def early(rounds):
        patient = {"select": Select("global_test", patience=1, min_delta=1.0), "gate": ConstantGate(1.0)}
        first = Phase("first", FedAvg(SHARED), rounds, **patient)
        return [first, Phase("second", FedAvg(SHARED), 3, start="first", gate=ConstantGate(1.0))]

    with pytest.raises(KeyboardInterrupt):
        federation(tmp_path, early(5), callbacks=[Kill("on_round_end", 3)]).fit(model(), data())
    with pytest.raises(MisconfigurationException, match=r"phases\.first\.rounds was 5, now 6"):
        federation(tmp_path, early(6)).fit(model(), data(), ckpt_path="last")


@pytest.mark.slow
class Reset(FedAvg):
    """Its result is a model of zeros."""

    def server_final(self, server, is_last):
        return {name: torch.zeros_like(tensor) for name, tensor in server.items()} if is_last else None


def test_a_phase_ends_with_the_rounds_that_it_has_had_as_one_that_began_with_so_many(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        federation(tmp_path, phases(Reset(SHARED)), callbacks=[Kill("on_round_end", 3)]).fit(model(), data())
    shorter, whole = (federation(tmp_path / name, phases(Reset(SHARED), rounds=2)) for name in ("", "whole"))
    shorter.fit(model(), data(), ckpt_path="last")
    whole.fit(model(), data())
    assert not any(tensor.any() for tensor in whole.run.states["FedAvg"].server.values())
    assert_same(shorter.run.states["FedAvg"].server, whole.run.states["FedAvg"].server)
    assert (shorter.run_dir / "summary.csv").read_bytes() == (whole.run_dir / "summary.csv").read_bytes()


def test_harmless_changes_are_accepted_and_change_no_bit(tmp_path):
    later = [*phases()[:2], Phase("later", FedAvg(SHARED), rounds=2, start="initial", gate=ConstantGate(0.5))]
    whole = federation(tmp_path / "whole", [*later, Phase("new", Local())])
    whole.fit(model(), data())
    with pytest.raises(KeyboardInterrupt):
        federation(tmp_path, phases(rounds=3), callbacks=[Kill("on_round_end", 3)]).fit(model(), data())
    settings = {"trainer": {"accelerator": "cpu", "devices": 1, "enable_model_summary": False}, "name": "other"}
    changed = federation(tmp_path, [*later, Phase("new", Local())], backend=TrainerBackend(), callbacks=[], **settings)
    path = str(tmp_path / "federation/version_0/checkpoints/last.ckpt")
    changed.fit(other_model(), data(), ckpt_path=path)
    for name, state in whole.run.states.items():
        assert_same(changed.run.states[name].server, state.server)
    assert (changed.run_dir / "rounds.csv").read_bytes() == (whole.run_dir / "rounds.csv").read_bytes()


def test_numbers_of_numpy_are_those_of_python(tmp_path):
    numbers = {"trainer": {"accelerator": "cpu", "max_epochs": 1, "limit_train_batches": 0.5}, "seed": 3}
    of_numpy = {"trainer": {"accelerator": "cpu", "max_epochs": np.int64(1), "limit_train_batches": np.float32(0.5)}}
    of_numpy |= {"seed": np.int64(3), "evaluate_every_n_rounds": np.int64(1), "evaluation_cohort_size": np.int64(2)}
    first = phases(FedProx(np.float32(0.5), SHARED), rounds=np.int64(4), clients_per_round=np.int64(2))
    second = phases(FedProx(0.5, SHARED), rounds=4)
    with pytest.raises(KeyboardInterrupt):
        federation(tmp_path, first, callbacks=[Kill("on_round_end", 3)], **of_numpy).fit(model(), data())
    federation(tmp_path, second, evaluation_cohort_size=2, **numbers).fit(model(), data(), ckpt_path="last")


def test_what_a_lambda_sees_is_not_in_the_configuration(tmp_path):
    name = "Anna Meier"
    module = model()
    module.global_expert.extractor.append(Holder(lambda sample: sample == name))
    texts = configuration(federation(tmp_path, [Phase("FedAvg", FedAvg())]), module, data())
    assert "test_configuration" in texts["objects"] and name not in texts["objects"]


def test_commands_that_do_not_train_warn_of_changes(stopped):
    with pytest.warns(match=r"trainer\.max_epochs was 1, now 3\.$"):
        federation(stopped, phases()[:2], trainer={"accelerator": "cpu", "max_epochs": 3}).predict(model(), data())


def test_the_checkpoint_has_the_versions_and_the_configuration(stopped):
    content = load_checkpoint(stopped / "federation/version_0/checkpoints/last.ckpt")
    assert content["versions"]["torch"] and content["versions"].keys() == {"fedmoe-pl", "torch", "lightning"}
    objects = json.loads(content["configuration"]["objects"])
    assert content["configuration"]["hparams"] == "" and [phase["name"] for phase in objects["phases"]] == [
        *("Local", "FedAvg", "later")
    ]
    assert objects["model"]["optimizer"]["lr"] == 0.1 and "name" not in objects and "logger" not in objects["trainer"]


def test_the_configurations_of_a_command_line_are_compared_by_their_keys(tmp_path):
    def of_command_line(lr=0.1, shared="*", root="a", name="run", callbacks=None):
        run = federation(tmp_path, [Phase("FedAvg", FedAvg())])
        phase = {"name": "FedAvg", "algorithm": {"class_path": "FedAvg", "init_args": {"shared": shared}}, "rounds": 2}
        run.hparams = {
            "seed_everything": 0,
            "model": {"class_path": "Own", "init_args": {"optimizer": {"class_path": "SGD", "init_args": {"lr": lr}}}},
            "data": {"class_path": "CIFAR10", "init_args": {"root": root}},
            "trainer": {"callbacks": callbacks},
            "federation": {"name": name, "phases": [phase]},
        }
        return configuration(run, model(), data())

    def keys(**changed):
        return [change.key for change in changes(of_command_line(), of_command_line(**changed), ["FedAvg"])]

    assert keys() == keys(root="b", name="other") == []
    assert keys(lr=0.2) == ["model.init_args.optimizer.init_args.lr"]
    assert keys(shared="a", callbacks=[]) == [
        "federation.phases.FedAvg.algorithm.init_args.shared",
        "trainer.callbacks",
    ]
    in_python = configuration(federation(tmp_path, [Phase("FedAvg", FedAvg())]), other_model(lr=0.3), data())
    assert [str(change) for change in changes(of_command_line(), in_python, ["FedAvg"])] == [
        "model.optimizer.lr was 0.1, now 0.3"
    ]


class Holder(torch.nn.Identity):
    """A part of a model that has an argument of any kind."""

    def __init__(self, value):
        super().__init__()
        self.value = value


def power(base):
    return lambda round: base**round


VALUES = [
    (lambda round: 0.9**round, lambda round: 0.1**round),
    (power(0.9), power(0.1)),
    (partial(max, 1), partial(max, 2)),
    (partial(lambda a, b: a, 2), partial(lambda a, b: a + b, 2)),
    (lambda *, a=1: a, lambda *, a=2: a),
    (
        partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=power(0.9)),
        partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=power(0.1)),
    ),
    *((kind(1), kind(2)) for kind in (np.float16, np.longdouble, complex, Decimal)),
    (np.datetime64("2020"), np.datetime64("2021")),
    (Fraction(1, 2), Fraction(1, 3)),
    (torch.zeros(1001, 1000), torch.zeros(1001, 1000).index_fill(0, torch.tensor(1000), 1)),
    (np.array(["a", 1], object), np.array(["a", 2], object)),
    (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse()),
    (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
]


@pytest.mark.parametrize("values", VALUES, ids=[f"{type(one).__name__}-{n}" for n, (one, _) in enumerate(VALUES)])
def test_a_value_of_any_kind_is_told_from_another(values, tmp_path):
    def of(value):
        module = model()
        module.global_expert.extractor.append(Holder(value))
        return configuration(federation(tmp_path, [Phase("FedAvg", FedAvg())]), module, data())

    one, same, other = (of(value) for value in (values[0], values[0], values[1]))
    assert changes(one, same, []) == []
    (change,) = changes(one, other, [])
    assert change.key.startswith("model.global_expert.extractor.2.value")


def test_one_client_is_not_all_of_them(tmp_path):
    one, all_of_them = (
        configuration(federation(tmp_path, [Phase("FedAvg", FedAvg(), clients_per_round=number)]), model(), data())
        for number in (1, 1.0)
    )
    assert [*map(str, changes(one, all_of_them, ["FedAvg"]))] == ["phases.FedAvg.clients_per_round was 1, now 1.0"]


def test_a_layer_that_is_called_a_second_time_is_a_change(tmp_path):
    def of(*, twice):
        module, activation = model(), torch.nn.ReLU()
        module.global_expert.extractor.extend([activation] * (1 + twice))
        return configuration(federation(tmp_path, [Phase("FedAvg", FedAvg())]), module, data())

    assert changes(of(twice=True), of(twice=True), []) == []
    (change,) = changes(of(twice=False), of(twice=True), [])
    assert change.key == "model.global_expert.extractor.3"
