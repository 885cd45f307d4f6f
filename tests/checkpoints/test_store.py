"""What clients keep, on disk: the same bits as in memory, whatever happens in between."""

import os
import shutil

import pytest
import torch
from helpers import blobs
from helpers.runs import Kill, assert_same, federation, model
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import Federation, Phase, Select
from fedmoe_pl.algorithms import FedAvg, FineTuning, Local, PFLMoE
from fedmoe_pl.checkpoints.checkpoint import CLIENT_STATES, PhaseState, load_checkpoint
from fedmoe_pl.checkpoints.client_state import StatesOnDisk
from fedmoe_pl.checkpoints.client_store import DiskStore
from fedmoe_pl.models import ConstantGate, LinearGate

# of the phase that shares what the clients of the phase before keep to themselves
pytestmark = pytest.mark.filterwarnings("ignore:.* have each trained for themselves")


def data(**kwargs):
    return blobs((13, 8, 11, 9), dtype=torch.float32, **kwargs)


def phases() -> list[Phase]:
    """Clients keep their local expert, two of four in a round; a later phase starts from what they kept."""
    torch.manual_seed(1)
    mixed = {"gate": ConstantGate(0.5), "clients_per_round": 2}
    return [
        Phase("FedPer", FedAvg("global_expert.*"), rounds=4, select=Select("global_test"), **mixed),
        Phase("again", FedAvg("*.classifier.*"), start="FedPer", **mixed),
        Phase("PFL-FB", FineTuning("local_expert.classifier.*", gate_fraction=0.25), start="FedPer"),
        Phase("PFL-MF", PFLMoE(), gate=LinearGate(5), max_epochs=3),
    ]


def on_disk(path, its_phases=None, **kwargs) -> Federation:
    return federation(path, its_phases or phases(), **{"store": "disk", **kwargs})


def in_memory(state: PhaseState) -> dict:
    """The state as a dict whose kept tensors have been read."""
    return {**vars(state), "clients": dict(state.clients), "best_clients": dict(state.best_clients)}


def assert_same_run(actual: Federation, expected: Federation) -> None:
    """Equal to the last bit: what is in memory, what was written, and what both checkpoints hold."""
    assert [*actual.run.states] == [*expected.run.states]
    content, other = (load_checkpoint(run.run_dir / "checkpoints/last.ckpt") for run in (actual, expected))
    for name in expected.run.states:
        assert_same(in_memory(actual.run.states[name]), in_memory(expected.run.states[name]))
        assert_same(in_memory(content["phases"][name]), in_memory(other["phases"][name]))
    assert_same({**content, "phases": None}, {**other, "phases": None})
    for path in (path for path in expected.run_dir.rglob("*") if path.is_file() and "checkpoints" not in path.parts):
        assert (actual.run_dir / path.relative_to(expected.run_dir)).read_bytes() == path.read_bytes()


def files(run: Federation) -> set[str]:
    return {
        path.relative_to(run.run_dir / CLIENT_STATES).as_posix() for path in (run.run_dir / CLIENT_STATES).rglob("*.*")
    }


def needed_files(run: Federation) -> set[str]:
    kept = [kept for state in run.run.states.values() for kept in (state.clients, state.best_clients) if kept]
    return {one.path(client).relative_to(run.run_dir / CLIENT_STATES).as_posix() for one in kept for client in one}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Federation:
    run = federation(tmp_path_factory.mktemp("whole"), phases())
    run.fit(model(), data())
    assert run.results["FedPer"].round < 4, "the test shows nothing if the last round is the best"
    assert 2 <= len(run.run.states["FedPer"].clients) and all(run.run.states["FedPer"].clients.values())
    return run


def test_a_run_that_keeps_on_disk_is_the_run_that_keeps_in_memory(whole, tmp_path):
    run = on_disk(tmp_path)
    run.fit(model(), data())
    assert all(isinstance(state.clients, StatesOnDisk) for state in run.run.states.values())
    assert_same_run(run, whole)
    for name in run.run.states:
        for client in range(4):
            assert_same(*(dict(one.client_module(name, client).state_dict()) for one in (run, whole)))
    assert files(run) == needed_files(run)


@pytest.mark.parametrize("stores", [("disk", "disk"), ("memory", "disk"), ("disk", "memory")])
def test_a_run_stopped_anywhere_goes_on_in_either_store_to_the_same_bits(whole, tmp_path, stores):
    with pytest.raises(KeyboardInterrupt):
        on_disk(tmp_path, store=stores[0], callbacks=[Kill("on_client_end", 6)]).fit(model(), data())
    run = on_disk(tmp_path, store=stores[1])
    run.fit(model(seed=9), data(), ckpt_path="last")
    assert_same_run(run, whole)
    if stores == ("disk", "disk"):
        assert files(run) == needed_files(run)


@pytest.mark.parametrize("evaluation_point", ["before", "after"])
@pytest.mark.parametrize(
    ("call", "n"),
    [
        *(("os.replace", n) for n in (2, 33)),
        *(pytest.param("os.replace", n, marks=pytest.mark.slow) for n in (5, 8, 19)),
        ("pathlib.Path.unlink", 6),
        *(pytest.param("pathlib.Path.unlink", n, marks=pytest.mark.slow) for n in (1, 4)),
    ],
)
def test_a_kill_at_any_write_or_removal_leaves_a_checkpoint_with_all_its_files(
    whole, tmp_path, monkeypatch, call, evaluation_point, n
):
    # tried once with n from 2 to 33
    done = os.replace if call == "os.replace" else os.unlink
    calls = iter(range(1, n))

    def killed(*arguments, **kwargs):
        last = next(calls, None) is None
        if evaluation_point == "after" or not last:
            done(*arguments)
        if last:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(call, killed)
        try:
            on_disk(tmp_path).fit(model(), data())
        except KeyboardInterrupt:
            pass
        else:
            assert call != "os.replace", "a run has more writes than that"
    for state in load_checkpoint(tmp_path / "federation/version_0/checkpoints/last.ckpt")["phases"].values():
        for kept in (state.clients, state.best_clients):
            assert all(dict(kept).values())
    run = on_disk(tmp_path)
    run.fit(model(seed=9), data(), ckpt_path="last")
    assert_same_run(run, whole)


def test_a_phase_that_starts_from_another_shares_its_files(whole, tmp_path):
    run = on_disk(tmp_path, phases()[:2])
    run.fit(model(), data())
    kept = run.run.states["again"].clients
    inherited = [client for client in kept if kept.path(client).parent.name == "FedPer"]
    assert inherited and len(inherited) < len(kept)
    for client in inherited:
        assert kept.path(client) == run.run.states["FedPer"].clients.path(client)
        assert_same(kept[client], whole.run.states["again"].clients[client])
        assert not any(".classifier." in name for name in kept[client])  # comes from the server in this phase
        assert any(".classifier." in name for name in run.run.states["FedPer"].clients[client])


def test_the_checkpoint_does_not_grow_with_what_clients_keep_nor_with_finished_phases(whole, tmp_path):
    class Sizes(Kill):
        def __init__(self):
            super().__init__("on_round_end", -1)
            self.written = {}

        def count(self, run, phase, round):
            self.written[phase.name] = (run.folder / "checkpoints/last.ckpt").stat().st_size

    sizes, few = Sizes(), Sizes()
    everybody = [Phase(name, Local(), gate=ConstantGate(0.0)) for name in ("one", "two", "three")]
    on_disk(tmp_path / "disk", everybody, callbacks=[sizes]).fit(model(), data())
    one_of_four = [Phase(name, Local(), gate=ConstantGate(0.0), clients_per_round=1) for name in sizes.written]
    on_disk(tmp_path / "few", one_of_four, callbacks=[few]).fit(model(), data())
    assert sizes.written["one"] == pytest.approx(few.written["one"], abs=100)  # four clients kept as much as one
    assert sizes.written["three"] - sizes.written["two"] == pytest.approx(0, abs=1000)  # a row of numbers
    on_disk(tmp_path / "memory", everybody, store="memory", callbacks=[sizes]).fit(model(), data())
    assert sizes.written["three"] - sizes.written["two"] == pytest.approx(0, abs=1000)


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_test_and_predict_read_what_lies_on_disk(tmp_path, capsys, store):
    run = on_disk(tmp_path)
    run.fit(model(), data(test_fraction=0.3, validation_fraction=0.2))
    table = capsys.readouterr().out.strip("\n").splitlines()[:7]
    again = on_disk(tmp_path, store=store)
    again.test(model(seed=3), data(test_fraction=0.3, validation_fraction=0.2))
    assert capsys.readouterr().out.splitlines()[:7] == table
    again.validate(model(seed=3), data(test_fraction=0.3, validation_fraction=0.2))
    again.predict(model(seed=3), data(test_fraction=0.3, validation_fraction=0.2))
    rows = [row.split(",") for row in (run.run_dir / "predictions.csv").read_text().splitlines()]
    right = [row[4] == row[5] for row in rows if row[:3] == ["PFL-MF", "after local training", "1"]]
    assert sum(right) / len(right) == pytest.approx(run.results["PFL-MF"].clients[1].local_test)
    assert files(run) == needed_files(run)


@pytest.mark.parametrize(("given", "store"), [("memory", "disk"), ("disk", "memory")])
def test_a_result_of_another_run_is_taken_from_either_store(whole, tmp_path, given, store):
    other = whole
    if given == "disk":
        other = on_disk(tmp_path / "other")
        other.fit(model(), data())
    mine = phases()[:3]
    mine[0].ckpt_path = str(other.run_dir / "checkpoints/last.ckpt")
    run = on_disk(tmp_path, mine, store=store)
    run.fit(model(), data())
    for name in ("FedPer", "again", "PFL-FB"):
        assert_same(dict(run.run.states[name].clients), dict(whole.run.states[name].clients))
    if store == "disk":
        assert files(run) == needed_files(run), "what is kept is this run's own"


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_missing_or_damaged_file_ends_in_one_sentence(tmp_path, damage):
    with pytest.raises(KeyboardInterrupt):
        on_disk(tmp_path, name="stopped", callbacks=[Kill("on_round_end", 5)]).fit(model(), data())
    stopped = tmp_path / "stopped/version_0" / CLIENT_STATES
    given = phases()
    for original in (next((stopped / phase).glob("*.pt")) for phase in ("FedPer", "again")):
        shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
        shutil.copytree(tmp_path / "stopped", tmp_path / "damaged")
        path = tmp_path / "damaged/version_0" / CLIENT_STATES / original.relative_to(stopped)
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(original.read_bytes()[:-100])
        given[0].ckpt_path = str(path.parents[2] / "last.ckpt")
        attempts = [(on_disk(tmp_path, name="damaged"), "last")]
        if path.parent.name == "FedPer":
            attempts.append((on_disk(tmp_path, given, name="new"), None))
        for run, ckpt_path in attempts:
            with pytest.raises(MisconfigurationException) as error:
                run.fit(model(), data(), ckpt_path=ckpt_path)
            sentence = str(error.value)
            assert sentence.startswith(f"Federation: store is 'disk', but '{path}', which holds what client ")
            assert sentence.endswith(".") and "\n" not in sentence
    assert damage != "missing" or not (tmp_path / "new").exists(), "refused before any training"


def test_a_store_that_cannot_be_is_refused(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"store is 'disk', .* without enable_checkpointing"):
        on_disk(tmp_path, enable_checkpointing=False)


def test_a_file_holds_a_tensor_and_not_what_it_is_a_view_of(tmp_path):
    store = DiskStore(tmp_path, 3)
    kept = store.adopt("phase", 0, {})
    everything = torch.arange(100_000.0)
    kept = store.updated("phase", kept, store.write("phase", 1, {1: {"w": everything[7:9]}, 2: {}}))
    assert [*kept] == [1] and len(kept) == 1 and kept.get(0) is kept.get(3) is None and 2 not in kept
    assert kept[1]["w"].tolist() == [7, 8]
    assert (tmp_path / "phase/1_1.pt").stat().st_size < 5000
    nothing = store.updated("phase", kept, store.write("phase", 2, {1: {}}))
    assert not nothing and [*kept] == [1]
    store.remove_replaced(nothing, kept)
    assert kept[1]["w"].tolist() == [7, 8]
    store.remove_replaced(nothing)
    assert kept[1]["w"].tolist() == [7, 8], "the checkpoint before this one refers to it"
    store.remove_replaced(nothing)
    assert not [*(tmp_path / "phase").iterdir()]
