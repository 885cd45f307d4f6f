"""The files in which a client of a deployed federation keeps its tensors: which it uses, and which it removes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fedmoe_pl.checkpoints.checkpoint import CLIENT_STATES
from fedmoe_pl.checkpoints.client_state import File, Names, RemoteStates, read_tree, selected, write_tree
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.deployment.messages import BadMessageError, Message
from fedmoe_pl.deployment.remote_clients import files_of
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.phases.starts import sources
from fedmoe_pl.rounds.begin import begin_phase
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.trees import Tree

_ROUNDS = 4  # the one of the newest file, the one before, and those of the server's last two checkpoints


class OwnFiles:
    """What a client keeps in a phase: a file after each training, exchange or step.

    The server says from which file the client goes on; after a kill, that is an older one. The client checks that it is
    one of this phase, or of a phase that this one starts from.

    The server has no say in what is removed. Of the files that the newest one goes back to, a client keeps those of the
    last four rounds in which it wrote any, whatever numbers the server gives these rounds. The server's last two
    checkpoints refer to some of them: a client may be trained for a round before the server has written the checkpoint
    of the round before. Files that the newest one does not go back to stay.
    """

    def __init__(self, run: Run, phase: Phase, client: int) -> None:
        self.folder = run.folder / CLIENT_STATES
        self.phase = phase
        self.client = client
        self.usable = _usable(run, phase)

    def named(self, message: Message) -> list[File]:
        """The files that a message says to go on from."""
        files = [(phase, number, names) for phase, number, names in message.values["kept"]]
        for i, (phase, _, names) in enumerate(files):
            if (phase, names) not in self.usable:
                raise BadMessageError(f"phase '{self.phase.name}' does not go on from such tensors of phase {phase!r}")
            if (phase, names) in [(before, of_before) for before, _, of_before in files[:i]]:
                raise BadMessageError(f"it names two files of phase {phase!r}")
        return files

    def are_newest(self, message: Message) -> bool:
        """Whether a message names the newest file of the phase, and no other."""
        return self.named(message) == [(self.phase.name, max(_files(self._folder), default=0), None)]

    def read(self, message: Message) -> Tree:
        """The tensors in the files that a message names; exceptions as in ``named`` and ``read_tree``."""
        tree: Tree = {}
        for phase, number, names in self.named(message):
            tree |= read_own(self.folder, phase, self.client, number, names)
        return tree

    def write(self, message: Message, tree: Tree) -> int:
        """Writes what the client keeps after a message; returns the number of the file, 0 if it keeps nothing."""
        if not tree:
            return 0
        number = max(_files(self._folder), default=0) + 1
        file = _OwnFile(number, message.values["round"], self._number(message))
        write_tree(self._folder / file.name, tree, phase=self.phase.name, client=self.client, number=number)
        if self.phase.monitor is None:  # otherwise any of them may become the result
            self._remove_replaced()
        return number

    def finish(self, message: Message) -> None:
        """Removes what is not needed after the phase, whose result is in the files that a message names."""
        self._remove_replaced(self._number(message))

    @property
    def _folder(self) -> Path:
        return self.folder / self.phase.name

    def _number(self, message: Message) -> int:
        """The number of the file of this phase that a message names; 0 if it names none."""
        return max((number for phase, number, _ in self.named(message) if phase == self.phase.name), default=0)

    def _remove_replaced(self, result: int = 0) -> None:
        """Removes what the newest file goes back to before its last rounds, but not the result."""
        files = _files(self._folder)
        chain = [files[number] for number in [max(files, default=0)] if number]
        while chain and chain[-1].before in files:
            chain.append(files[chain[-1].before])
        rounds = [*dict.fromkeys(file.round for file in chain)][:_ROUNDS]
        for file in chain:
            if file.round not in rounds and file.number != result:
                (self._folder / file.name).unlink()


class _OwnFile(NamedTuple):
    """A file, as its name says."""

    number: int  # the client counts the files of a phase from 1, and writes none twice
    round: int  # in which it was written, counted from 0
    before: int  # the number of the phase's file that the client went on from; 0 for none

    @property
    def name(self) -> str:
        return f"{self.number}_{self.round}_{self.before}.safetensors"


def _files(folder: Path) -> dict[int, _OwnFile]:
    """The files of a phase, by number."""
    files = (_OwnFile(*map(int, path.stem.split("_"))) for path in folder.glob("*_*_*.safetensors"))
    return {file.number: file for file in files}


def read_own(folder: Path, phase: str, client: int, number: int, names: Names | None) -> Tree:
    """Reads a client's own file, see ``read_tree``; ``number`` is the one that the client gave it."""
    file = _files(folder / phase).get(number, _OwnFile(number, 0, 0))
    tree = read_tree(folder / phase / file.name, phase=phase, client=client, number=number)
    return tree if names is None else selected(tree, names)


def _usable(run: Run, phase: Phase) -> list[tuple[str, Names | None]]:
    """From which phases' files a client may go on in a phase, and with which of their tensors, by which names.

    These are its own files, and those of the phases that it starts from, without what the server sends.
    """
    by_name, before = {each.name: each for each in run.phases}, []
    for part, name in sources(run.starts[phase.name]):
        files = [(of_phase, 0, names) for of_phase, names in _usable(run, by_name[name])]
        initial = dict(run.module(by_name[name]).state_dict())
        before.append((part, PhaseState(initial, {}, RemoteStates({0: files}))))
    started = begin_phase(phase, run.module(phase), before, None)
    return [(phase.name, None), *((of_phase, names) for of_phase, _, names in files_of(started.clients, 0))]
