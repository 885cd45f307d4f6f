"""Files of a run that are damaged, exchanged or crafted: each is noticed in one sentence, and nothing is lost."""

import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import zipfile
from contextlib import contextmanager

import pytest
import torch
from helpers.runs import Kill, assert_same, data, federation, model
from lightning.fabric.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FedAvg, Local
from fedmoe_pl.checkpoints import checkpoint
from fedmoe_pl.checkpoints.checkpoint import CLIENT_STATES, copy_checkpoint, load_checkpoint, rows_of
from fedmoe_pl.checkpoints.files import (
    DamagedFileError,
    _write,
    header_of,
    read_tensors,
    replacing,
    write_json,
    write_tensors,
)
from fedmoe_pl.models import ConstantGate

CHECKPOINT, PREVIOUS = "checkpoints/last.ckpt", "checkpoints/previous.ckpt"
FINISHED, TENSORS = "checkpoints/finished/Local.ckpt", "checkpoints/tensors"


def phases() -> list[Phase]:
    """Clients keep their local expert; the first phase is finished when the run stops."""
    gate = ConstantGate(0.5)
    return [
        Phase("Local", Local(), gate=ConstantGate(0.0)),
        Phase("FedPer", FedAvg("global_expert.*"), rounds=5, gate=gate, start="initial", clients_per_round=2),
    ]


def run_of(path, **kwargs):
    return federation(path, phases(), **kwargs)


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


def rewritten(path, change) -> None:
    """Changes what a file of JSON says; its checksum is right again."""
    content = json.loads(path.read_bytes())
    del content["crc32"]
    change(content)
    write_json(path, content)


def one_of(folder, name: str):
    """A file of the run; the first of those of a folder."""
    return folder / name if name.endswith(".ckpt") else min((folder / name).rglob("*.safetensors"))


def refusal(folder, ckpt_path="last", may_write=False) -> str:
    """The sentence with which the run in a folder is refused; unless it may write, it may not change a file."""
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(MisconfigurationException) as error:
        run_of(folder.parents[1]).fit(model(), data(), ckpt_path=ckpt_path)
    assert may_write or {path: path.read_bytes() for path in files} == files
    sentence = str(error.value)
    assert sentence.endswith(".") and "\n" not in sentence
    return sentence


@pytest.mark.parametrize("name", [CHECKPOINT, FINISHED, TENSORS, f"{CLIENT_STATES}/Local"])
@pytest.mark.few(1)
def test_every_flipped_bit_is_noticed(copy, name):
    path, needed = one_of(copy, name), copy / CHECKPOINT
    content = path.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(content)), 60):
        path.write_bytes(flipped(content, bit))
        with pytest.raises(MisconfigurationException) as error:
            for state in load_checkpoint(needed)["phases"].values():
                assert all(dict(state.clients).values())
        assert f"'{path}'" in str(error.value) and "\n" not in str(error.value)


def test_the_damaged_one_of_several_files_of_tensors_is_named(copy):
    named = 0
    for path in (copy / TENSORS).glob("*.safetensors"):  # also those that the checkpoint before the last one needs
        content = path.read_bytes()
        path.write_bytes(flipped(content, 4 * len(content)))
        try:
            load_checkpoint(copy / CHECKPOINT)
        except MisconfigurationException as error:
            named += 1
            assert f"'{path}'" in str(error)
        path.write_bytes(content)
    assert named > 1


@pytest.mark.slow
def test_every_flipped_bit_of_a_small_file_is_noticed(tmp_path):
    write_tensors(tmp_path / "a", {"x": torch.arange(3.0), '"crc32":"00000000"': torch.tensor(1)})
    content = (tmp_path / "a").read_bytes()
    assert load_file(tmp_path / "a")["x"].tolist() == read_tensors(tmp_path / "a")["x"].tolist() == [0, 1, 2]
    for bit in range(8 * len(content)):
        (tmp_path / "b").write_bytes(flipped(content, bit))
        with pytest.raises(DamagedFileError):
            read_tensors(tmp_path / "b")


@pytest.mark.parametrize("content", [b"", b"\x80\x02}q\x00.", b"PK\x03\x04", b'{"fedmoe_pl": 8}'])
def test_a_checkpoint_of_other_bytes_ends_in_one_sentence(copy, content):
    (copy / PREVIOUS).unlink()
    (copy / CHECKPOINT).write_bytes(content)
    assert refusal(copy).endswith("last.ckpt', which is damaged or not a checkpoint of tensors and plain values.")


OTHER_VERSIONS = {
    "another number": lambda content: content.update(fedmoe_pl=99),
    "no rows": lambda content: content.pop("rows"),
    "no phases": lambda content: content.pop("phases"),
    "no server": lambda content: content["phases"]["FedPer"].pop("server"),
}


@pytest.mark.parametrize("what", ["an archive, as older ones", *OTHER_VERSIONS])
def test_a_checkpoint_of_another_version_ends_in_one_sentence(copy, what):
    if what in OTHER_VERSIONS:
        rewritten(copy / CHECKPOINT, OTHER_VERSIONS[what])
    else:
        torch.save({"fedmoe_pl": 7}, copy / CHECKPOINT)
    assert "which another version of this package wrote; this one reads format" in refusal(copy)


def test_the_file_of_one_phase_is_no_checkpoint(copy):
    with pytest.raises(MisconfigurationException, match=r"a single phase; the run's checkpoint is .*/last\.ckpt"):
        load_checkpoint(one_of(copy, FINISHED))


def places_in(node, keys=()):
    """The keys to every value in a file of JSON, of a list only to its first one."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node[:1]):
        yield (*keys, key)
        if isinstance(value, dict | list):
            yield from places_in(value, (*keys, key))


ODD = [None, "x", -1, 10**30, math.inf, [], [1], {}, True]


@pytest.mark.parametrize("name", [CHECKPOINT, FINISHED])
def test_whatever_stands_in_place_of_a_value_a_checkpoint_is_read_or_refused_in_one_sentence(copy, name):
    """A stranger can give a file a right checksum."""
    content = json.loads((copy / name).read_bytes())
    start = {CHECKPOINT: ("phases", "rows", "files"), FINISHED: ("state",)}[name]
    places = [keys for keys in places_in(content) if keys[0] in start and "initial" not in keys]
    for keys, odd in zip(places, itertools.cycle(ODD)):

        def change(content, keys=keys, odd=odd):
            *path, last = keys
            for key in path:
                content = content[key]
            content[last] = odd

        rewritten(copy / name, change)
        try:
            loaded = load_checkpoint(copy / CHECKPOINT)
            rows_of(copy / CHECKPOINT, loaded)
            assert all(dict(state.clients) is not None for state in loaded["phases"].values())
        except MisconfigurationException as error:
            assert "\n" not in str(error)
        write_json(copy / name, {key: value for key, value in content.items() if key != "crc32"})


@pytest.mark.parametrize("name", [CHECKPOINT, FINISHED])
def test_a_checkpoint_that_is_too_deep_is_refused_in_one_sentence(copy, name):
    content = json.loads((copy / name).read_bytes())
    (copy / PREVIOUS).unlink()
    text = json.dumps({**content, "crc32": "00000000"}).removesuffix("}") + ', "deep": ' + "[" * 10**5 + "]" * 10**5
    _write(copy / name, text.replace('"crc32": ', '"crc32":', 1).encode() + b"}")
    assert "another version" in refusal(copy)


@pytest.mark.parametrize("name", [FINISHED, TENSORS])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(copy, name):
    path = one_of(copy, name)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(MisconfigurationException, match=f"which needs '{path}'"):
        load_checkpoint(copy / CHECKPOINT)
    assert header_of(path) == {}


def test_a_checkpoint_of_lightning_that_is_compressed_is_refused_and_not_unpacked(tmp_path, monkeypatch):
    """Of zeros, a megabyte in a file of a kilobyte; a file of megabytes would take hours."""
    with zipfile.ZipFile(tmp_path / "bomb.ckpt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(2**20))
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda self: pytest.fail("it is unpacked"))
    with pytest.raises(MisconfigurationException, match="is damaged or not a checkpoint"):
        load_checkpoint(tmp_path / "bomb.ckpt")


@pytest.mark.filterwarnings("ignore:Validating sparse", "ignore:Sparse invariant")
def test_what_has_no_values_in_a_checkpoint_of_lightning_does_not_count(tmp_path):
    others = ["text", torch.empty(2, device="meta"), torch.eye(2).to_sparse(), None]
    torch.save({"state_dict": {"a": torch.ones(2), **dict(zip("bcde", others, strict=True))}}, tmp_path / "a.ckpt")
    assert [*load_checkpoint(tmp_path / "a.ckpt")["state_dict"]] == ["a"]
    torch.save({"state_dict": [1, 2]}, tmp_path / "list.ckpt")
    with pytest.raises(MisconfigurationException, match="which is not a checkpoint of a federation or of Lightning"):
        load_checkpoint(tmp_path / "list.ckpt")


class Touch:
    """A pickle that makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", [CHECKPOINT, PREVIOUS, FINISHED, TENSORS, f"{CLIENT_STATES}/FedPer"])
def test_a_crafted_pickle_is_not_executed(copy, tmp_path, name):
    for path in [copy / name] if name.endswith(".ckpt") else (copy / name).rglob("*.*"):
        torch.save({"fedmoe_pl": 5, "a": Touch(tmp_path / "executed")}, path)
    refusal(copy, str(copy / PREVIOUS) if name == PREVIOUS else "last", may_write="clients" in name)
    assert not (tmp_path / "executed").exists()


def test_after_damage_the_checkpoint_before_is_offered_and_goes_on_to_the_same_bits(whole, copy, tmp_path):
    for damaged in (b"hello", None):
        (copy / CHECKPOINT).unlink()
        if damaged:
            (copy / CHECKPOINT).write_bytes(damaged)
        sentence = refusal(copy)
        assert sentence.endswith(f"; the checkpoint before it is whole: go on with ckpt_path '{copy / PREVIOUS}'.")
    run = run_of(tmp_path, callbacks=[Kill("on_round_start", 1)])
    with pytest.raises(KeyboardInterrupt):  # a second kill, before the next checkpoint
        run.fit(model(seed=9), data(), ckpt_path=str(copy / PREVIOUS))
    run = run_of(tmp_path)
    run.fit(model(seed=9), data(), ckpt_path="last")
    for name, state in whole.run.states.items():
        assert_same(run.run.states[name].server, state.server)
        assert_same(run.run.states[name].clients, state.clients)
    for name in ("rounds.csv", "clients.csv", "summary.csv", "checkpoints/rows.jsonl"):
        assert (copy / name).read_bytes() == (whole.run_dir / name).read_bytes()


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


@pytest.mark.parametrize("kind", ["missing", "cut", "client", "round", "phase"])
def test_what_a_client_keeps_is_not_missing_damaged_or_taken_from_another_file(copy, kind):
    kept = load_checkpoint(copy / CHECKPOINT)["phases"]["FedPer"].clients
    (mine,), (other,) = (kept.paths(client) for client in [*kept][:2])
    client, round = mine.stem.split("_")
    owner = {"phase": "FedPer", "client": client, "round": round}
    if kind == "missing":
        mine.unlink()
    elif kind == "cut":
        mine.write_bytes(mine.read_bytes()[:-100])
    elif kind == "client":
        shutil.copy(other, mine)
    else:
        write_tensors(mine, read_tensors(mine), **{**owner, kind: "7" if kind == "round" else "other"})
    sentence = refusal(copy, may_write=True)
    assert sentence.startswith(f"Federation: '{mine}', which holds what client {client} keeps, is missing, damaged or")


@pytest.mark.parametrize("kind", ["missing", "cut"])
def test_a_given_result_needs_the_files_of_its_clients(copy, tmp_path, kind):
    path, given = one_of(copy, f"{CLIENT_STATES}/Local"), phases()
    path.write_bytes(path.read_bytes()[:-100])
    sentence = f"Federation: '{path}', which holds what client "
    if kind == "missing":
        path.unlink()
        assert refusal(copy).startswith(sentence)
    given[0].ckpt_path = str(copy / CHECKPOINT)
    with pytest.raises(MisconfigurationException, match=re.escape(sentence)):
        federation(tmp_path, given, name="new").fit(model(), data())
    assert kind != "missing" or not (tmp_path / "new").exists(), "refused before any training"


@pytest.mark.parametrize("name", [FINISHED, TENSORS])
def test_a_checkpoint_needs_the_files_that_it_refers_to(copy, name):
    path = one_of(copy, name)
    content = path.read_bytes()
    for damaged in (content[:-100], None):
        path.unlink()
        if damaged:
            path.write_bytes(damaged)
        assert f"which needs '{path}', but that is missing, damaged or another's" in refusal(copy)
    if name == FINISHED:
        path.write_bytes(content)
        rewritten(path, lambda content: content.update(phase="other"))
    else:
        shutil.copy(max(path.parent.iterdir()), path)
    assert f"which needs '{path}', but that is missing, damaged or another's" in refusal(copy)


def test_whose_last_rows_are_damaged_the_checkpoint_before_is_offered(whole, copy, tmp_path):
    rows = copy / "checkpoints/rows.jsonl"
    written = rows.read_bytes()
    rows.write_bytes(written[:-1])
    assert refusal(copy).endswith(
        f"whose rows of rounds.csv are in '{rows}', which is missing or damaged; the checkpoint before it is whole: go "
        f"on with ckpt_path '{copy / PREVIOUS}'."
    )
    for damaged in (flipped(written, 99), b""):  # the rows of the checkpoint before, too
        rows.write_bytes(damaged)
        assert refusal(copy).endswith("rows.jsonl', which is missing or damaged.")
    rows.write_bytes(written[:-1])
    run_of(tmp_path).fit(model(seed=9), data(), ckpt_path=str(copy / PREVIOUS))
    assert rows.read_bytes() == (whole.run_dir / "checkpoints/rows.jsonl").read_bytes()


@pytest.mark.few(1)
@pytest.mark.parametrize("moment", ["before the rows", "after the rows", "after the previous checkpoint"])
def test_a_kill_after_a_return_to_the_checkpoint_before_leaves_both_readable(
    whole, copy, moment, tmp_path, monkeypatch
):
    """Its next rows replace those of the newer checkpoint, which must not be needed any more."""

    def killed(original):
        def function(*arguments):
            if moment.startswith("after"):
                original(*arguments)
            raise KeyboardInterrupt

        return function

    with monkeypatch.context() as patch:
        name = "copy_checkpoint" if "previous" in moment else "append_rows"
        patch.setattr(checkpoint, name, killed(getattr(checkpoint, name)))
        with pytest.raises(KeyboardInterrupt):
            run_of(tmp_path).fit(model(), data(), ckpt_path=str(copy / PREVIOUS))
    for name in (PREVIOUS, CHECKPOINT):
        rows_of(copy / name, load_checkpoint(copy / name))
    run_of(tmp_path).fit(model(), data(), ckpt_path="last")
    for name in ("rounds.csv", "checkpoints/rows.jsonl"):
        assert (copy / name).read_bytes() == (whole.run_dir / name).read_bytes()


def test_rounds_append_rows_and_the_checkpoint_does_not_grow(tmp_path):
    written = []

    class Sizes(Kill):
        def count(self, run, phase, round):
            csv = (run.folder / "rounds.csv").stat()
            files = [path.stat().st_size for path in (run.folder / TENSORS).iterdir()]
            written.append(((run.folder / CHECKPOINT).stat().st_size, sum(files), csv.st_ino, csv.st_size))

    rounds = [Phase("FedAvg", FedAvg("global_expert.*"), rounds=6, gate=ConstantGate(1.0))]
    run = federation(tmp_path, rounds, callbacks=[Sizes("on_round_end", -1)])
    run.fit(model(), data())
    sizes, of_tensors, inodes, lengths = zip(*written, strict=True)
    assert max(sizes) - min(sizes) < 300 and len(set(inodes)) == 1
    assert len(set(of_tensors[2:])) == 1, "those of the models, of this round and of the one before"
    assert [*lengths] == sorted(set(lengths)), "a row more after every round"
    assert len((run.run_dir / "rounds.csv").read_text().splitlines()) == 7


@contextmanager
def full_after(size: int):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size", [100, 1500])
def test_a_full_disk_ends_in_one_sentence_and_the_old_checkpoint_stays(copy, size):
    old = (copy / CHECKPOINT).read_bytes()
    with full_after(size):
        sentence = refusal(copy, may_write=True)
    assert sentence.endswith(" cannot be written: File too large.")
    assert (copy / CHECKPOINT).read_bytes() == old and not [*copy.rglob("*.tmp")]


def test_a_kill_after_a_return_to_the_previous_checkpoint_leaves_both_whole(tmp_path):
    """Names of one file: replacing one by the other does nothing, and the temporary one must not be written to."""
    last, previous = tmp_path / "last.ckpt", tmp_path / "previous.ckpt"
    previous.write_text("round 1")
    for _ in range(2):  # the process is killed before its first checkpoint, and the command is given again
        copy_checkpoint(previous, last)
    os.link(last, tmp_path / "last.ckpt.tmp")  # or between the link and the replacement
    with pytest.raises(KeyboardInterrupt), replacing(last) as temporary:
        temporary.write_bytes(b"half")
        raise KeyboardInterrupt
    assert last.read_text() == previous.read_text() == "round 1"
