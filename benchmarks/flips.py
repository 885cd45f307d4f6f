"""Flips a bit in a file of a run again and again, goes on with the run, and looks for results that differ silently.

    python benchmarks/flips.py --flips 150

Each time, one random bit is flipped in a copy of a run's folder: of a run that was killed in its first phase or in its
last, of one that has ended, or of a deployed one, where server and clients have folders. Kinds of files take turns. A
run that was killed is continued, and one that has ended predicts, as does a client of a deployed one alone. A flip is
"noticed" if that ends in one sentence, "harmless" if the result is that of the whole run to the last bit, and "silent"
if it ends with another result. A "crash" is any other exception. The server and the clients of the deployed run are in
one process, and a client that fails once ends it. Tables (CSV) have no checksum and are left alone: a run that goes on
writes them anew.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import kills
import kills_deployed
from deployment import write_inputs
from kills import end, forked, noted, same
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import ClientFailures, Federation, PersonalizedMoE
from fedmoe_pl.checkpoints.checkpoint import FILE, ROWS
from fedmoe_pl.data import NpzFile
from fedmoe_pl.deployment import Message, Participant, Transport, serve
from fedmoe_pl.phases.client_failures import ClientError

CLIENTS, ROUNDS = kills_deployed.CLIENTS, 8
NUMBERS = re.compile(r"[0-9a-f]{32}|\d+")


class InProcess(Transport):
    """Passes messages to participants in this process, as bytes."""

    def __init__(self, participants: Mapping[int, Participant]) -> None:
        self.participants = participants

    def ask(self, messages: Mapping[int, Message], seconds: float | None) -> dict[int, Message]:
        """The participants' answers."""
        answers = {}
        for client, message in messages.items():
            answer = self.participants[client].answer(Message.from_bytes(message.to_bytes()))
            answers[client] = Message.from_bytes(answer.to_bytes())
        return answers


def parts(folder: Path, root: str, path: str) -> tuple[Federation, PersonalizedMoE, NpzFile]:
    """Settings, model and data, of which one client trains in each round; one that fails ends the run."""
    federation, model, data = kills_deployed.parts(folder, root, path, ROUNDS)
    federation.phases = [replace(federation.phases[0], clients_per_round=1)]
    federation.failures = ClientFailures("raise")
    return federation, model, data


def deploy(folder: Path) -> None:
    """Begins a deployed run, or continues it."""
    participants = {}
    for client in range(CLIENTS):
        root = f"client_{client}"
        federation, model, data = parts(folder, root, f"{client}.npz")
        participants[client] = Participant(federation, model, data, client, federation.runs / root)
    federation, model, data = parts(folder, "server", "all.npz")
    begun = any((folder / "server").rglob("*.ckpt"))
    serve(federation, model, data, InProcess(participants), CLIENTS, "last" if begun else None)


def of_deployed(folder: Path) -> Any:
    """What server and clients have at the end."""
    return kills_deployed.content(folder, "server")


def predict(folder: Path) -> None:
    """Writes the predictions of a run that has ended."""
    kills.parts(folder)[0].predict(*kills.parts(folder)[1:])


def predict_alone(folder: Path) -> None:
    """Writes the predictions of a client of a deployed run that has ended, on its own machine."""
    federation, model, data = parts(folder, "client_0", "0.npz")
    (checkpoint,) = (folder / "client_0").glob(f"*/*/*/{FILE}")
    federation.predict(model, data, str(checkpoint))


def predictions(folder: Path) -> bytes:
    """The predictions that were written."""
    (path,) = folder.rglob("predictions.csv")
    return path.read_bytes()


class Case(NamedTuple):
    """A folder in which bits are flipped.

    Attributes:
        folder: where it is.
        go_on: what is then done in a copy of it.
        result: reads what that has come to.
        whole: the result without a flip.
        files: the files, by kind.
    """

    folder: Path
    go_on: Callable[[Path], None]
    result: Callable[[Path], Any]
    whole: Any
    files: dict[str, list[Path]]


def case(folder: Path, go_on: Callable[[Path], None], result: Callable[[Path], Any], below: str = ".") -> Case:
    """Goes on in a copy without a flip, and finds the files below a folder."""
    copy = shutil.copytree(folder, folder.with_name("without a flip"))
    assert outcome(copy, go_on) == "", outcome(copy, go_on)
    files = defaultdict(list)
    for path in sorted((folder / below).rglob("*")):
        if path.is_file() and path.stat().st_size and path.suffix != ".csv":
            files[NUMBERS.sub("*", str(path.relative_to(folder)))].append(path.relative_to(folder))
    found = Case(folder, go_on, result, result(copy), dict(files))
    shutil.rmtree(copy)
    return found


def outcome(folder: Path, go_on: Callable[[Path], None]) -> str:
    """How that ends in a process of its own: what an exception says, or nothing."""

    def told() -> None:
        warnings.simplefilter("ignore")
        try:
            go_on(folder)
        except (MisconfigurationException, ClientError) as error:
            (folder / "outcome").write_text(f"refused: {error}")
        except BaseException as error:
            (folder / "outcome").write_text(f"crash: {error!r}")

    os.waitpid(forked(told), 0)
    path = folder / "outcome"
    return path.read_text() if path.is_file() else ""


def killed(folder: Path, begin: Callable[[Path], None], enough: Callable[[], bool]) -> Path:
    """The folder of a run that was killed when it had done enough."""
    folder.mkdir(exist_ok=True)
    process = forked(begin, folder)
    while not enough():
        assert not os.waitpid(process, os.WNOHANG)[0], "the run has ended: set KILLS_LOG to see how"
        time.sleep(0.002)
    end(process)
    return folder


def flip(path: Path, rng: random.Random) -> None:
    """Flips a random bit of a file."""
    content = bytearray(path.read_bytes())
    bit = rng.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.unlink()  # another name of the same file stays as it is
    path.write_bytes(content)


def cases(folder: Path) -> dict[str, Case]:
    """The folders in which bits are flipped."""

    def begin(run: Path) -> None:
        kills.train(run, workers=1)

    def has_rows(run: Path, number: int) -> bool:
        return any(len(path.read_text().splitlines()) >= number for path in (run / "server").rglob(Path(ROWS).name))

    first, last, ended = folder / "first phase", folder / "last phase", folder / "ended"
    killed(first, begin, lambda: len(noted(first)) >= 25)
    killed(last, begin, lambda: any(last.rglob("finished/PFL-FB.ckpt")))
    ended.mkdir()
    early, late, whole = (folder / f"deployed, {name}" for name in ("first round", "later", "ended"))
    for run in (early, late, whole):
        run.mkdir()
        write_inputs(run, CLIENTS, ROUNDS)
    killed(early, deploy, lambda: has_rows(early, 1))
    killed(late, deploy, lambda: has_rows(late, 5))
    for run, process in ((ended, forked(begin, ended)), (whole, forked(deploy, whole))):
        assert not os.waitpid(process, 0)[1], f"{run}: set KILLS_LOG to see how"
    own = next((whole / "client_0").glob("*/*/*/checkpoints")).parent.relative_to(whole)
    return {
        "fit in first phase": case(first, begin, kills.content, kills.NAME),
        "fit in last phase": case(last, begin, kills.content, kills.NAME),
        "predict": case(ended, predict, predictions, kills.NAME),
        "serve and join after a round": case(early, deploy, of_deployed),
        "serve and join": case(late, deploy, of_deployed),
        "predict at a client": case(whole, predict_alone, predictions, str(own)),
    }


def measure(folder: Path, flips: int, only: str, rng: random.Random) -> None:
    """Flips so many bits; prints what is silent or crashes, and how many ended how for each kind of file."""
    made = cases(folder)
    kinds = [(name, kind) for name, each in made.items() for kind in each.files if not kind.endswith((".npz", ".yaml"))]
    kinds = [(name, kind) for name, kind in kinds if re.search(only, f"{name}: {kind}")]
    found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for number in range(flips):
        name, kind = kinds[number % len(kinds)]
        of_run = made[name]
        copy = shutil.copytree(of_run.folder, folder / "flipped", symlinks=True)
        path = rng.choice(of_run.files[kind])
        flip(copy / path, rng)
        said = outcome(copy, of_run.go_on)
        if said.startswith("refused"):
            how = "noticed" if "\n" not in said else "crash"
        elif said:
            how = "crash"
        else:
            how = "harmless" if same(of_run.result(copy), of_run.whole) else "silent"
        if how in ("silent", "crash") or os.environ.get("FLIPS_VERBOSE"):
            print(f"{name}: {path}: {how}: {said}", flush=True)
        found[name, kind][how] += 1
        shutil.rmtree(copy)
    hows = ("noticed", "harmless", "silent", "crash")
    print(f"{'':90}" + "".join(f"{how:>10}" for how in hows))
    for (name, kind), counted in found.items():
        print(f"{name + ': ' + kind:90}" + "".join(f"{counted[how]:>10}" for how in hows))
    total = sum(found.values(), Counter[str]())
    print(f"{'all':90}" + "".join(f"{total[how]:>10}" for how in hows), flush=True)


def main() -> None:
    """Flip, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=150)
    parser.add_argument("--only", default="", help="kinds of files, as the table names them: a regular expression")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), options.flips, options.only, random.Random(options.seed))


if __name__ == "__main__":
    main()
