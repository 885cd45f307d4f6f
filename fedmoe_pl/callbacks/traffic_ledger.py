"""A file of every tensor that clients and server sent each other."""

from __future__ import annotations

import csv
import os
from collections import Counter
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn

from fedmoe_pl.backends import Transfer
from fedmoe_pl.checkpoints.phase_state import WAYS
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run

FILE = "traffic.csv"
COLUMNS = ("phase", "round", "direction", "client", "tensor", "shape", "dtype", "bytes")


class TrafficLedger(FederationCallback):
    """Writes ``traffic.csv``: a row for every tensor that the server or a client sent, in every round.

    Directions are ``down`` (from the server to the client), ``requests`` and ``up`` (from the client to the server,
    before and after its training) and ``between_clients`` (to the client; the tensor's name begins with the id of the
    client that sent it, and a dot). The tensor ``(weight)`` stands for the number by which the server weighs a client's
    update, and counts no bytes. All other rows of a phase add up to the bytes in ``rounds.csv``; requests are in
    ``bytes_up``. What is computed before the first round (``Algorithm.server_begin``) is not in the file.

    Every logger gets the bytes of each round, such as ``FedAvg/traffic_of_round/bytes_up``. A resumed run goes on with
    the file of the killed one. Rounds that were run without this callback are not in the file, although they count in
    ``rounds.csv``; a warning says so. A row has about 60 bytes: 1,000 rounds of 10 clients with a LeNet-5 make 13 MB.
    """

    def on_fit_start(self, run: Run) -> None:
        """Begins the file; that of a resumed run loses the rows of rounds that are run again."""
        path = run.folder / FILE
        recorded: Counter[str] = Counter()
        if run.states and path.is_file():
            recorded = _cut(path, {name: state.round for name, state in run.states.items()})
        else:
            path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
        sent = {name: sum(state.traffic[f"bytes_{way}"] for way in WAYS) for name, state in run.states.items()}
        missing = [
            f"{size - recorded[name]:,} bytes of '{name}'" for name, size in sent.items() if size > recorded[name]
        ]
        if missing:
            rank_zero_warn(
                f"TrafficLedger: {FILE} lacks {', '.join(missing)}, which were sent in rounds without this callback; "
                "the bytes in rounds.csv count them."
            )

    def on_transfers(self, run: Run, phase: Phase, round: int, transfers: list[Transfer]) -> None:
        """Appends the rows of a round, and logs its bytes in every direction."""
        with (run.folder / FILE).open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(
                (phase.name, round + 1, direction, client, tensor, "x".join(map(str, shape)) or "()", dtype, size)
                for direction, client, tensor, shape, dtype, size in transfers
            )
        totals: Counter[str] = Counter()
        for transfer in transfers:
            totals[transfer.direction] += transfer.bytes
        scalars = {f"traffic_of_round/bytes_{direction}": float(number) for direction, number in totals.items()}
        run.loggers.log_scalars(phase.name, scalars, run.states[phase.name].round)


def _cut(path: Path, rounds: dict[str, int]) -> Counter[str]:
    """Keeps only the rows of completed rounds, which come first; returns the bytes sent in them, by phase."""
    end, sent = 0, Counter[str]()
    with path.open("rb") as file:
        for line in file:
            if end:
                if not line.endswith(b"\n"):  # a kill cut it off
                    break
                name, round, *_, size = next(csv.reader([line.decode()]))
                if int(round) > rounds.get(name, 0):
                    break
                sent[name] += int(size)
            end += len(line)
    os.truncate(path, end)
    return sent
