"""What clients keep, in files: the same bits as in memory, whatever happens in between; and how tensors are written."""

import json
import os

import pytest
import torch
from helpers import blobs
from helpers.runs import Kill, assert_same, federation, model
from lightning.fabric.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file

from fedmoe_pl import Federation, Phase, Select, Train
from fedmoe_pl.algorithms import FedAvg, FineTuning, Local, PFLMoE
from fedmoe_pl.checkpoints import client_state
from fedmoe_pl.checkpoints.checkpoint import CLIENT_STATES, load_checkpoint
from fedmoe_pl.checkpoints.client_state import FileStore
from fedmoe_pl.checkpoints.files import _AT_ONCE, _DTYPES, TensorFiles, read_tensors, same_bits, write_tensors
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
        Phase("PFL-MF", PFLMoE(), gate=LinearGate(5), train=Train(max_epochs=3)),
    ]


def fitted(path, its_phases=None, ckpt_path=None, **kwargs) -> Federation:
    run = federation(path, its_phases or phases(), **kwargs)
    run.fit(model(seed=9 if ckpt_path else 0), data(), ckpt_path=ckpt_path)
    return run


def assert_same_run(actual: Federation, expected: Federation) -> None:
    """Equal to the last bit: what is in memory, what was written, and what both checkpoints hold."""
    assert_same(actual.run.states, expected.run.states)
    if actual.enable_checkpointing and expected.enable_checkpointing:
        assert_same(*(load_checkpoint(run.run_dir / "checkpoints/last.ckpt") for run in (actual, expected)))
    for path in expected.run_dir.rglob("*.csv"):
        assert (actual.run_dir / path.relative_to(expected.run_dir)).read_bytes() == path.read_bytes()


def assert_only_needed_files(run: Federation) -> None:
    kept = [kept for state in run.run.states.values() for kept in (state.clients, state.best_clients) if kept]
    needed = {path for one in kept for client in one for path in one.paths(client)}
    assert {path for path in (run.run_dir / CLIENT_STATES).rglob("*") if path.is_file()} == needed


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Federation:
    run = fitted(tmp_path_factory.mktemp("whole"))
    assert run.results["FedPer"].round < 4, "the test shows nothing if the last round is the best"
    assert 2 <= len(run.run.states["FedPer"].clients) and all(run.run.states["FedPer"].clients.values())
    return run


@pytest.mark.slow
@pytest.mark.parametrize("cached", [0, 2**20])
def test_a_run_that_keeps_in_files_is_the_run_that_keeps_in_memory(whole, tmp_path, monkeypatch, cached):
    monkeypatch.setattr(client_state, "_CACHED", cached)
    in_files, in_memory = fitted(tmp_path / "files"), fitted(tmp_path / "memory", enable_checkpointing=False)
    for run in (in_files, in_memory):
        assert_same_run(run, whole)
    for name in whole.run.states:
        for client in range(4):
            assert_same(*(dict(one.client_module(name, client).state_dict()) for one in (in_files, in_memory)))
    assert_only_needed_files(in_files)
    assert not [*in_memory.run_dir.rglob("*.safetensors")]


def test_each_tensor_of_a_run_is_in_one_file(whole):
    tensors = [tensor for path in whole.run_dir.rglob("*.safetensors") for tensor in load_file(path).values()]
    contents = [(t.dtype, t.shape, t.numpy().tobytes()) for t in tensors if t.numel() > 4]
    assert len(set(contents)) == len(contents) > 30


@pytest.mark.slow
def test_a_run_stopped_in_a_round_goes_on_to_the_same_bits(whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path, callbacks=[Kill("on_client_end", 6)])
    run = fitted(tmp_path, ckpt_path="last")
    assert_same_run(run, whole)
    assert_only_needed_files(run)


@pytest.mark.few("os.replace-4-before")
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    ("call", "n"),
    [*(("os.replace", n) for n in (4, 5, 6, 8, 9, 10, 19, 33)), *(("pathlib.Path.unlink", n) for n in (2, 5, 7, 9))],
)
def test_a_kill_at_any_write_or_removal_leaves_a_checkpoint_with_all_its_files(
    whole, tmp_path, monkeypatch, call, moment, n
):
    # tried once with n from 1 to 60; the first removal is of a note of an earlier run, before there is a checkpoint
    done = os.replace if call == "os.replace" else os.unlink
    calls = iter(range(1, n))

    def killed(*arguments, **kwargs):
        last = next(calls, None) is None
        if moment == "after" or not last:
            done(*arguments)
        if last:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(call, killed)
        with pytest.raises(KeyboardInterrupt):
            fitted(tmp_path)
    for state in load_checkpoint(tmp_path / "federation/version_0/checkpoints/last.ckpt")["phases"].values():
        for kept in (state.clients, state.best_clients):
            assert all(dict(kept).values())
    run = fitted(tmp_path, ckpt_path="last")
    assert_same_run(run, whole)
    assert not {*run.run_dir.rglob("*.tmp")}


def test_a_phase_that_starts_from_another_uses_its_files_for_what_it_leaves_as_it_is(whole):
    before, kept = (whole.run.states[name].clients for name in ("FedPer", "again"))
    inherited = [client for client in kept if kept.paths(client) == before.paths(client)]
    assert inherited and len(inherited) < len(kept)
    for client in inherited:
        assert not any(".classifier." in name for name in kept[client])  # comes from the server in this phase
        assert any(".classifier." in name for name in before[client])
    tuned, mixed = (whole.run.states[name].clients for name in ("PFL-FB", "PFL-MF"))
    for client in range(4):
        *of_before, own = mixed.paths(client)
        assert tuned.paths(client)[-1] in of_before
        assert {*load_file(own)} == {"gate.linear.weight", "gate.linear.bias"} == {*mixed[client]} - {*tuned[client]}


@pytest.mark.slow
def test_a_round_writes_what_changed_whatever_other_clients_keep_and_other_phases_were(tmp_path):
    class Sizes(Kill):
        def count(self, run, phase, round):
            self.written[phase.name] = (run.folder / "checkpoints/last.ckpt").stat().st_size

    sizes = []
    for folder, cohort in (("all", None), ("few", 1)):
        callback = Sizes("on_round_end", -1)
        callback.written = {}
        names = ("one", "two", "three")
        everybody = [Phase(name, Local(), gate=ConstantGate(0.0), clients_per_round=cohort) for name in names]
        fitted(tmp_path / folder, everybody, callbacks=[callback])
        sizes.append(callback.written)
    assert sizes[0]["one"] == pytest.approx(sizes[1]["one"], abs=200)  # four clients kept as much as one
    assert sizes[0]["three"] - sizes[0]["two"] == pytest.approx(0, abs=1000)


@pytest.mark.slow
def test_test_and_predict_read_the_files(tmp_path, capsys):
    run, arguments = federation(tmp_path, phases()), {"test_fraction": 0.3, "validation_fraction": 0.2}
    run.fit(model(), data(**arguments))
    table = capsys.readouterr().out.strip("\n").splitlines()[:7]
    again = federation(tmp_path, phases())
    again.test(model(seed=3), data(**arguments))
    assert capsys.readouterr().out.splitlines()[:7] == table
    again.validate(model(seed=3), data(**arguments))
    again.predict(model(seed=3), data(**arguments))
    rows = [row.split(",") for row in (run.run_dir / "predictions.csv").read_text().splitlines()]
    right = [row[4] == row[5] for row in rows if row[:3] == ["PFL-MF", "after local training", "1"]]
    assert sum(right) / len(right) == pytest.approx(run.results["PFL-MF"].clients[1].local_test)
    assert all(0 <= float(row[-1]) <= 1 for row in rows if row[0] == "PFL-MF"), "weights of the gate"
    assert_only_needed_files(run)


@pytest.mark.parametrize("enable_checkpointing", [True, False])
def test_a_result_of_another_run_is_taken_from_its_files(whole, tmp_path, enable_checkpointing):
    mine = phases()[:3]
    mine[0].ckpt_path = str(whole.run_dir / "checkpoints/last.ckpt")
    run = fitted(tmp_path, mine, enable_checkpointing=enable_checkpointing)
    for name in ("FedPer", "again", "PFL-FB"):
        assert_same(dict(run.run.states[name].clients), dict(whole.run.states[name].clients))
    if enable_checkpointing:
        assert_only_needed_files(run)  # what is kept is this run's own


def test_a_file_holds_a_tensor_and_not_what_it_is_a_view_of(tmp_path):
    store = FileStore(tmp_path, 3)
    kept = store.adopt("phase", 0, {})
    everything = torch.arange(100_000.0)
    kept = store.updated("phase", kept, store.write("phase", 1, {1: {"w": everything[7:9]}, 2: {}}))
    assert [*kept] == [1] and len(kept) == 1 and kept.get(0) is kept.get(3) is None and 2 not in kept
    assert kept[1]["w"].tolist() == [7, 8] and kept[1]["w"].untyped_storage().nbytes() == 8
    path = tmp_path / "phase/1_1.safetensors"
    assert path.stat().st_size < 500
    nothing = store.updated("phase", kept, store.write("phase", 2, {1: {}}))
    assert not nothing and [*kept] == [1]
    store.remove_replaced(nothing, kept)
    store.remove_replaced(nothing)
    assert path.is_file(), "the checkpoint before this one refers to it"
    store.remove_replaced(nothing)
    assert not path.is_file()


def read(folder, content):
    return json.loads(json.dumps(content), object_hook=TensorFiles(folder).read)


def test_a_tensor_is_written_once_and_another_bit_makes_another_tensor(tmp_path):
    files, a, nan = TensorFiles(tmp_path), torch.randn(50), torch.full((3,), torch.nan)
    tensors = {"a": a, "copy": a.clone(), "view": a[:2], "zero": torch.tensor(0.0)}
    written, used = files.write({"server": tensors, "rest": [1, None]}, [])
    assert used == {1} and {*load_file(tmp_path / "1.safetensors")} == {"server/a", "server/view", "server/zero"}
    assert_same(read(tmp_path, written), {"server": tensors, "rest": [1, None]})
    others = [a, torch.tensor(-0.0), a.double(), a.reshape(5, 10)]
    written, used = files.write({"other": others, "nan": [nan, nan.clone()]}, [])
    assert used == {1, 2}
    assert {*load_file(tmp_path / "2.safetensors")} == {"other/1", "other/2", "other/3", "nan/0"}
    again = read(tmp_path, written)
    assert_same(again["other"], others)
    assert str(again["other"][1]) == "tensor(-0.)" and again["nan"][0] is again["nan"][1]
    files.keep(used, [])
    assert files.write({"server": tensors}, [])[1] == {1}, "nothing is written again"


@pytest.mark.parametrize("is_a_copy", [False, True])
def test_a_tensor_that_was_changed_in_place_is_written_anew(is_a_copy, tmp_path):
    """Such as a table of clients, of which a hook sets a row."""
    files, table = TensorFiles(tmp_path), torch.zeros(100, 3)
    if is_a_copy:
        files.write({"other": table.clone()}, [])
    written = [files.write({"table": table}, [])[0]]
    for row in (70, 80):
        before = table.clone()
        table[row] = row
        written.append(files.write({"table": table}, [])[0])
        assert_same([read(tmp_path, each)["table"] for each in written[-2:]], [before, table])


def test_files_of_which_little_is_used_are_left_unless_they_stay(tmp_path):
    files, large = TensorFiles(tmp_path), {str(i): torch.randn(20_000) for i in range(4)}
    files.write(large, [])
    assert files.write({"0": large["0"]}, staying=[1])[1] == {1}
    some = {"0": large["0"], "1": large["1"], "2": large["2"]}
    assert files.write(some, [])[1] == {1}, "it is mostly used"
    written, used = files.write({"0": large["0"]}, [])
    assert used == {2}
    files.keep(used, [1])
    assert len([*tmp_path.iterdir()]) == 2, "the checkpoint before may need the other one"
    files.keep(used, [])
    assert [path.name for path in tmp_path.iterdir()] == ["2.safetensors"]
    assert_same(read(tmp_path, written), {"0": large["0"]})
    assert files.write({"1": large["1"]}, [])[1] == {3}


def test_nothing_is_remembered_of_tensors_that_are_gone(tmp_path):
    """Each round looks at all that is remembered."""
    files = TensorFiles(tmp_path)
    for round in range(4):
        files.keep(files.write({"server": torch.full((3,), round)}, [])[1], [])
    assert len(files._known) == 1


def test_a_type_without_a_name_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"no file has torch.complex128, as 'z' is\.$"):
        write_tensors(tmp_path / "1", {"z": torch.zeros(1, dtype=torch.complex128)})


@pytest.mark.parametrize("dtype", _DTYPES)
def test_the_library_reads_every_type_that_is_written(dtype, tmp_path):
    tensors = {
        "a": torch.tensor([[1, 0, 2]]).to(dtype),
        "flag": torch.tensor(True),
        "none": torch.zeros(0, 3, dtype=dtype),
    }
    write_tensors(tmp_path / "of a view", {**tensors, "view": tensors["a"].expand(2, 3).T}, owner="it")
    found = load_file(tmp_path / "of a view")
    assert {name: same_bits(tensor, found[name]) for name, tensor in tensors.items()} == dict.fromkeys(tensors, True)
    assert found["view"].shape == (3, 2) and same_bits(found["view"], tensors["a"].expand(2, 3).T)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_tensors_that_are_written_in_pieces_are_read_whole(more, tmp_path):
    tensor = torch.randint(256, (2 * _AT_ONCE + more,), dtype=torch.uint8)
    write_tensors(tmp_path / "large", {"x": tensor})
    assert load_file(tmp_path / "large")["x"].equal(tensor) and read_tensors(tmp_path / "large")["x"].equal(tensor)
