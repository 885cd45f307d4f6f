"""DP-SGD on a client's own machine: the secret that its noise follows from, and the rounds that it was used for."""

from __future__ import annotations

import hmac
import json
import secrets
import zlib
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.backends import LocalTraining
from fedmoe_pl.checkpoints.files import read_json, replacing, write_json
from fedmoe_pl.checkpoints.phase_state import NOT_PRIVATE
from fedmoe_pl.deployment.messages import BadMessageError, Message
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.privacy import check_target, in_rounds, steps_of_round
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.trees import with_prefix

SECRET, _ROUNDS = "secret", "private_rounds.json"
_BYTES, _OF_CHECKSUM, _OF_SEED = 32, 4, 16


class PrivateRounds:
    """The rounds that a client has trained with DP-SGD in a run, each with one message only.

    A round's noise follows from the client's secret, its samples, the run, the phase and the round, so that a client
    that was killed computes the same again. It may hide one result only: the difference of two with the same noise has
    none. So a round that was trained is trained again with the same message, data and settings, or not at all, and a
    client's folder has one such run, since each further one would spend epsilon again. Rounds without noise that come
    after the first phase with it are noted, too.

    The rounds are in a file of the run, which the secret's file names. Neither is used without the other: epsilon would
    silently begin anew.
    """

    def __init__(self, folder: Path, run_name: str, client: int) -> None:
        self.folder = folder
        self.run_name = run_name
        self.client = client
        self._path = self._rounds_of(run_name)
        self._phases: dict[str, dict[str, list]] = _read(self._path)

    def begin(self, training: LocalTraining) -> int:
        """The seed of what nobody else may know in a phase."""
        of_phase = json.dumps([self.run_name, training.phase_name, training.rounds_before]).encode()
        return int.from_bytes(hmac.digest(self._secret(), of_phase, "sha256")[:_OF_SEED], "little")

    def add(self, run: Run, training: LocalTraining, message: Message) -> None:
        """Notes that a round is trained, before it is; refuses one with noise that was trained with anything else."""
        round, rounds = message.values["round"], self._phases.get(training.phase_name, {})
        if training.sample_privacy is None:
            if self._path.is_file():  # from the first phase with noise on
                self._add(training, round, ["", *NOT_PRIVATE, 1])
            return
        if round >= training.rounds:
            raise BadMessageError(f"round {round} is none of phase '{training.phase_name}'")
        digest = _digest(run, training, message, self.client)
        if str(round) not in rounds:
            self._add(training, round, [digest, *steps_of_round(training, self.client)])
        elif rounds[str(round)][0] != digest:
            raise BadMessageError(
                "it has trained this round with other tensors, samples or settings, and sample_privacy allows no others"
            )

    def check_target(self, run: Run, phase: Phase, training: LocalTraining) -> None:
        """Refuses a phase whose rounds so far had less noise than all of them must have for its target."""
        left = training.rounds - len(self._phases.get(phase.name, {}))
        spent = self.steps([phase.name, *(before.name for before in run.phases_before(phase))])
        check_target(phase, self.client, spent, [in_rounds(steps_of_round(training, self.client), left)])

    def steps(self, phases: Iterable[str]) -> list[list[float]]:
        """The steps of the rounds that were trained in some phases, as the accountant counts them."""
        return [steps for phase in phases for _, *steps in self._phases.get(phase, {}).values()]

    def _secret(self) -> bytes:
        """The secret of this run, made at the first call; it is in no message, and in no other file."""
        path = self.folder / SECRET
        anew = f"or move '{self.folder}' away and begin anew, so that the epsilons of both add up"
        trained = [each.parent.name for each in sorted(self.folder.glob(f"*/{_ROUNDS}")) if _read(each)]
        if others := [name for name in trained if name != self.run_name]:
            raise MisconfigurationException(
                f"this client has trained with sample_privacy in another run, {others[0]}; go on with that, {anew}"
            )
        if path.is_file():
            secret, run_name = read_secret(path)
            if not (rounds := self._rounds_of(run_name)).is_file():
                raise MisconfigurationException(
                    f"'{rounds}', in which this client counts what its training has spent, is missing; put it back, "
                    f"{anew}"
                )
            if run_name == self.run_name:
                return secret
        if trained:
            raise MisconfigurationException(
                f"'{path}', from which the noise of this client followed, is missing or another's; put it back, {anew}"
            )
        self._write(self._phases)  # first, so that a kill leaves no secret without it
        return new_secret(path, self.run_name)

    def _rounds_of(self, run_name: str) -> Path:
        return self.folder / run_name / _ROUNDS

    def _add(self, training: LocalTraining, round: int, row: list) -> None:
        name = training.phase_name
        self._write({**self._phases, name: {**self._phases.get(name, {}), str(round): row}})

    def _write(self, phases: dict[str, dict[str, list]]) -> None:
        """Writes the rounds, which count only then: a full disk, for instance, must not make a round forgotten."""
        write_json(self._path, {"phases": phases})
        self._phases = phases


def _read(path: Path) -> dict[str, dict[str, list]]:
    """The rounds in a file, by phase; empty if there is none."""
    return read_json(path)["phases"] if path.is_file() else {}


def new_secret(path: Path, run_name: str) -> bytes:
    """Makes a secret for a run, in a file that only its owner can read."""
    secret = secrets.token_bytes(_BYTES)
    with replacing(path) as temporary:
        temporary.touch(mode=0o600)
        temporary.write_bytes(with_checksum(secret + run_name.encode()))
    return secret


def read_secret(path: Path) -> tuple[bytes, str]:
    """The secret in such a file, and the name of its run."""
    if (content := without_checksum(path.read_bytes())) is None:
        raise MisconfigurationException(
            f"'{path}', the secret from which noise follows, is damaged; put it back as it was."
        )
    return content[:_BYTES], content[_BYTES:].decode()


def _digest(run: Run, training: LocalTraining, message: Message, client: int) -> str:
    """Tells apart all that the result of a round depends on beside its random numbers."""
    tensors = {**with_prefix(training.initial, "initial/"), **with_prefix(message.tensors, "sent/")}
    of_round = training.rounds_before, message.values["kept"], training.hash_of_samples(client)
    settings = json.dumps([*of_round, run.identity, run.configuration], sort_keys=True)
    content = Message(settings, tensors=dict(sorted(tensors.items()))).to_bytes()
    return sha256(content).hexdigest()


def with_checksum(content: bytes) -> bytes:
    """What a file has of a content that is no JSON."""
    return content + zlib.crc32(content).to_bytes(_OF_CHECKSUM, "little")


def without_checksum(data: bytes) -> bytes | None:
    """The content of such a file; None if it is damaged."""
    content, checksum = data[:-_OF_CHECKSUM], data[-_OF_CHECKSUM:]
    return content if zlib.crc32(content) == int.from_bytes(checksum, "little") else None
