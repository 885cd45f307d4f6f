"""Files of a run that are damaged, exchanged or crafted: each is noticed in one sentence, and nothing is lost."""

import os
import random
import resource
import shutil
import signal

import pytest
import torch
from helpers.runs import Kill, assert_same, data, federation, model
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FedAvg, Local
from fedmoe_pl.checkpoints import checkpoint
from fedmoe_pl.checkpoints.checkpoint import copy_checkpoint, load_checkpoint, rows_of
from fedmoe_pl.checkpoints.writing import DamagedFileError, is_sealed, load, replacing, save
from fedmoe_pl.models import ConstantGate

CHECKPOINT, PREVIOUS = "checkpoints/last.ckpt", "checkpoints/previous.ckpt"


def phases() -> list[Phase]:
    """Clients keep their local expert; the first phase is finished when the run stops."""
    gate = ConstantGate(0.5)
    return [
        Phase("Local", Local(), gate=ConstantGate(0.0)),
        Phase("FedPer", FedAvg("global_expert.*"), rounds=5, gate=gate, start="initial", clients_per_round=2),
    ]


def run_of(path, store="disk", **kwargs):
    return federation(path, phases(), store=store, **kwargs)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a run that was stopped after three rounds of the second phase."""
    path = tmp_path_factory.mktemp("stopped")
    with pytest.raises(KeyboardInterrupt):
        run_of(path, callbacks=[Kill("on_round_end", 4)]).fit(model(), data())
    return path / "federation/version_0"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = run_of(tmp_path_factory.mktemp("whole"))
    run.fit(model(), data())
    return run


@pytest.fixture
def copy(stopped, tmp_path):
    """A copy of the stopped run's folder, to be damaged."""
    return shutil.copytree(stopped, tmp_path / "federation/version_0")


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def refusal(folder, ckpt_path="last", store="disk") -> str:
    """The sentence with which the run in a folder is refused; it may not change a file."""
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(MisconfigurationException) as error:
        run_of(folder.parents[1], store).fit(model(), data(), ckpt_path=ckpt_path)
    assert {path: path.read_bytes() for path in files} == files
    sentence = str(error.value)
    assert sentence.endswith(".") and "\n" not in sentence
    return sentence


def test_every_flipped_bit_of_a_checkpoint_is_noticed(stopped, tmp_path):
    content = (stopped / CHECKPOINT).read_bytes()
    path = tmp_path / "last.ckpt"
    for bit in random.Random(0).sample(range(8 * len(content)), 60):
        path.write_bytes(flipped(content, bit))
        with pytest.raises(MisconfigurationException, match=r"is damaged or not a checkpoint|has no checksum"):
            load_checkpoint(path)


def test_every_flipped_bit_of_a_small_file_is_noticed(tmp_path):
    save({"a": torch.arange(3.0)}, tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    assert is_sealed(tmp_path / "a") and torch.load(tmp_path / "a")["a"].tolist() == [0, 1, 2]
    for bit in range(0, 8 * len(content), 97):
        (tmp_path / "b").write_bytes(flipped(content, bit))
        with pytest.raises(DamagedFileError):
            load(tmp_path / "b")


@pytest.mark.parametrize("content", [b"", b"\x80\x02}q\x00.", b"PK\x03\x04"])
def test_a_checkpoint_of_other_bytes_ends_in_one_sentence(copy, content):
    (copy / PREVIOUS).unlink()
    (copy / CHECKPOINT).write_bytes(content)
    assert refusal(copy).endswith("last.ckpt', which is damaged or not a checkpoint of tensors and plain values.")


@pytest.mark.parametrize("keys", [["rows"], ["phases"], ["phases", "FedPer", "server"]])
def test_a_checkpoint_without_a_part_ends_in_one_sentence(copy, keys):
    part = content = torch.load(copy / CHECKPOINT, weights_only=True)
    for key in keys[:-1]:
        part = part[key]
    del part[keys[-1]]
    save(content, copy / CHECKPOINT)
    assert "which another version of this package wrote; this one reads format" in refusal(copy)


class Touch:
    """A pickle that makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", [CHECKPOINT, PREVIOUS, "checkpoints/finished/Local.ckpt", "checkpoints/clients"])
def test_a_crafted_pickle_is_not_executed(copy, tmp_path, name):
    path = copy / name if name != "checkpoints/clients" else next((copy / name / "FedPer").iterdir())
    save({"fedmoe_pl": 5, "a": Touch(tmp_path / "executed")}, path)
    refusal(copy, str(copy / PREVIOUS) if name == PREVIOUS else "last")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("store", ["disk", "memory"])
def test_after_damage_the_checkpoint_before_is_offered_and_goes_on_to_the_same_bits(whole, tmp_path, store):
    with pytest.raises(KeyboardInterrupt):
        run_of(tmp_path, store, callbacks=[Kill("on_round_end", 4)]).fit(model(), data())
    folder = tmp_path / "federation/version_0"
    for damaged in (b"hello", None):
        (folder / CHECKPOINT).unlink()
        if damaged:
            (folder / CHECKPOINT).write_bytes(damaged)
        sentence = refusal(folder, store=store)
        assert sentence.endswith(f"; the checkpoint before it is whole: go on with ckpt_path '{folder / PREVIOUS}'.")
    run = run_of(tmp_path, store, callbacks=[Kill("on_round_start", 1)])
    with pytest.raises(KeyboardInterrupt):  # a second kill, before the next checkpoint
        run.fit(model(seed=9), data(), ckpt_path=str(folder / PREVIOUS))
    run = run_of(tmp_path, store)
    run.fit(model(seed=9), data(), ckpt_path="last")
    for name, state in whole.run.states.items():
        assert_same(run.run.states[name].server, state.server)
        assert_same(dict(run.run.states[name].clients), dict(state.clients))
    for name in ("rounds.csv", "clients.csv", "summary.csv", "checkpoints/rows.jsonl"):
        assert (folder / name).read_bytes() == (whole.run_dir / name).read_bytes()


def test_the_checkpoint_before_is_whole_at_every_round(whole, tmp_path):
    class Reads(Kill):
        def count(self, run, phase, round):
            for state in load_checkpoint(run.folder / PREVIOUS)["phases"].values():
                assert all(dict(state.clients).values())
            self.n += 1

    reads = Reads("on_round_end", 100)
    run = run_of(tmp_path, callbacks=[reads])
    run.fit(model(), data())
    assert reads.n == 106, "it was called after every round"
    contents = [load_checkpoint(run.run_dir / name)["phases"]["FedPer"] for name in (CHECKPOINT, PREVIOUS)]
    assert all(content.finished for content in contents)


@pytest.mark.parametrize("kind", ["client", "round", "phase"])
def test_what_a_client_keeps_is_not_taken_from_another_file(copy, kind):
    kept = load_checkpoint(copy / CHECKPOINT)["phases"]["FedPer"].clients
    mine, other = (kept.path(client) for client in [*kept][:2])
    content = torch.load(mine, weights_only=True)
    if kind == "client":
        shutil.copy(other, mine)
    elif kind == "round":
        save({**content, "round": content["round"] + 1}, mine)
    else:
        save({**content, "phase": "Local"}, mine)
    client = mine.name.split("_")[0]
    sentence = refusal_in_training(copy)
    assert sentence.startswith(
        f"Federation: store is 'disk', but '{mine}', which holds what client {client} keeps, is "
    )


def refusal_in_training(folder) -> str:
    with pytest.raises(MisconfigurationException) as error:
        run_of(folder.parents[1]).fit(model(), data(), ckpt_path="last")
    return str(error.value)


def test_a_finished_phase_must_be_as_it_was_written(copy):
    finished = copy / "checkpoints/finished/Local.ckpt"
    content = torch.load(finished, weights_only=True)
    finished.write_bytes(flipped(finished.read_bytes(), 5000))
    assert "finished/Local.ckpt', but that is damaged" in refusal(copy)
    save({**content, "phase": "other"}, finished)
    assert "finished/Local.ckpt', but that is of 'other'." in refusal(copy)


def test_whose_last_rows_are_damaged_the_checkpoint_before_is_offered(whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_of(tmp_path, callbacks=[Kill("on_round_end", 4)]).fit(model(), data())
    folder = tmp_path / "federation/version_0"
    rows = folder / "checkpoints/rows.jsonl"
    written = rows.read_bytes()
    rows.write_bytes(written[:-1])
    sentence = refusal(folder)
    assert sentence.endswith(
        f"whose rows of rounds.csv are in '{rows}', which is missing or damaged; the checkpoint before it is whole: go "
        f"on with ckpt_path '{folder / PREVIOUS}'."
    )
    for damaged in (flipped(written, 99), b""):  # the rows of the checkpoint before, too
        rows.write_bytes(damaged)
        assert refusal(folder).endswith("rows.jsonl', which is missing or damaged.")
    rows.write_bytes(written[:-1])
    resumed = run_of(tmp_path)
    resumed.fit(model(seed=9), data(), ckpt_path=str(folder / PREVIOUS))
    assert rows.read_bytes() == (whole.run_dir / "checkpoints/rows.jsonl").read_bytes()


@pytest.mark.parametrize("evaluation_point", ["before the rows", "after the rows", "after the previous checkpoint"])
def test_a_kill_after_a_return_to_an_older_checkpoint_leaves_both_readable(
    whole, evaluation_point, tmp_path, monkeypatch
):
    """Its next rows replace those of the newer checkpoints, which must not be needed any more."""

    class Copies(Kill):
        def count(self, run, phase, round):
            if round == 0:
                shutil.copy(run.folder / CHECKPOINT, run.folder / "checkpoints/older.ckpt")
            super().count()

    with pytest.raises(KeyboardInterrupt):
        run_of(tmp_path, "memory", callbacks=[Copies("on_round_end", 5)]).fit(model(), data())
    folder = tmp_path / "federation/version_0"

    def killed(original):
        def function(*arguments):
            if evaluation_point.startswith("after"):
                original(*arguments)
            raise KeyboardInterrupt

        return function

    with monkeypatch.context() as patch:
        name = "copy_checkpoint" if "previous" in evaluation_point else "append_rows"
        patch.setattr(checkpoint, name, killed(getattr(checkpoint, name)))
        with pytest.raises(KeyboardInterrupt):
            path = str(folder / "checkpoints/older.ckpt")
            run_of(tmp_path, "memory").fit(model(), data(), ckpt_path=path)
    for name in (PREVIOUS, CHECKPOINT):
        rows_of(folder / name, load_checkpoint(folder / name))
    run_of(tmp_path, "memory").fit(model(), data(), ckpt_path="last")
    for name in ("rounds.csv", "checkpoints/rows.jsonl"):
        assert (folder / name).read_bytes() == (whole.run_dir / name).read_bytes()


def test_rounds_append_rows_and_the_checkpoint_does_not_grow(tmp_path):
    written = []

    class Sizes(Kill):
        def count(self, run, phase, round):
            csv = (run.folder / "rounds.csv").stat()
            written.append(((run.folder / CHECKPOINT).stat().st_size, csv.st_ino, csv.st_size))

    rounds = [Phase("FedAvg", FedAvg("global_expert.*"), rounds=6, gate=ConstantGate(1.0))]
    run = federation(tmp_path, rounds, callbacks=[Sizes("on_round_end", -1)])
    run.fit(model(), data())
    sizes, inodes, lengths = zip(*written, strict=True)
    assert max(sizes) - min(sizes) < 200 and len(set(inodes)) == 1
    assert [*lengths] == sorted(set(lengths)), "a row more after every round"
    assert len((run.run_dir / "rounds.csv").read_text().splitlines()) == 7


def test_a_full_disk_ends_in_one_sentence_and_the_old_checkpoint_stays(copy):
    old = (copy / CHECKPOINT).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
    try:
        sentence = refusal_in_training(copy)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert sentence.endswith(" cannot be written: File too large.")
    assert (copy / CHECKPOINT).read_bytes() == old and not [*copy.rglob("*.tmp")]


def test_a_disk_that_is_full_in_the_middle_of_an_archive_is_its_own_cause(tmp_path):
    """PyTorch then fails a second time, with "unexpected pos"."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save({"first": torch.zeros(100_000), "second": torch.zeros(50)}, tmp_path / "archive.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_kill_after_a_return_to_the_previous_checkpoint_leaves_both_readable(tmp_path):
    """Names of one file: replacing one by the other does nothing, and the temporary one must not be written to."""
    last, previous = tmp_path / "last.ckpt", tmp_path / "previous.ckpt"
    save({"round": 1}, previous)
    for _ in range(2):  # the process is killed before its first checkpoint, and the command is given again
        copy_checkpoint(previous, last)
    os.link(last, tmp_path / "last.ckpt.tmp")  # or between the link and the replacement
    with pytest.raises(KeyboardInterrupt), replacing(last) as temporary:
        temporary.write_bytes(b"half")
        raise KeyboardInterrupt
    assert load(last) == load(previous) == {"round": 1}
