"""A client of a deployed federation: it trains, evaluates and keeps its tensors on its own machine."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info

from fedmoe_pl.aggregation.aggregation import PREFIX, Cohort
from fedmoe_pl.algorithms.algorithm import Algorithm, EvaluationPoint, needs_server_state, request_of
from fedmoe_pl.backends import Plan, one_thread
from fedmoe_pl.backends.local_client import after_exchange, given_to_others
from fedmoe_pl.checkpoints.checkpoint import CLIENT_STATES, FILE, CheckpointWriter, load_federation
from fedmoe_pl.checkpoints.client_state import File, Names, RemoteStates, read_tree, selected, write_tree
from fedmoe_pl.checkpoints.files import DamagedFileError, write_file
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.data.own_client import add_clients
from fedmoe_pl.deployment.answers import without_values
from fedmoe_pl.deployment.connection import module_of_flower
from fedmoe_pl.deployment.descriptions import check_same, described, own_data
from fedmoe_pl.deployment.messages import (
    FAILED,
    LEAVES,
    NOT_BEGUN,
    SEVERAL,
    UNPREPARED,
    BadMessageError,
    Message,
    answer_each,
    one_line,
)
from fedmoe_pl.deployment.private_rounds import PrivateRounds, with_checksum, without_checksum
from fedmoe_pl.deployment.remote_clients import files_of
from fedmoe_pl.deployment.reports import Reported
from fedmoe_pl.evaluation.client_models import evaluate_clients
from fedmoe_pl.evaluation.results import ClientEvaluation, Evaluation
from fedmoe_pl.phases.participation import cohort_of
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.phases.starts import sources
from fedmoe_pl.rounds.begin import begin_phase
from fedmoe_pl.rounds.evaluate import is_evaluated_after
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.setup.data import write_own_client
from fedmoe_pl.trees import Tree, digest_of

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


class Participant:
    """Answers the server's messages with the client half of the phases' algorithms.

    What the client keeps is in files below ``folder``. The messages say from which of them to go on, so that a client
    that was killed goes on as if nothing had happened. What leaves the client, from which phases it goes on, and which
    files it removes follows from its own settings and files; it refuses messages that ask for anything else.

    The settings are the server's, and ``datamodule`` has the client's own data, not yet set up. ``leaves`` is why it is
    none of the server's clients; empty if it is one.
    """

    run: Run
    _plan: Plan
    _own: OwnFiles
    _private: PrivateRounds

    def __init__(
        self, federation: Any, model: LightningModule, datamodule: FederatedDataModule, client: int, folder: Path
    ) -> None:
        self.federation = federation
        self.model = model
        self.datamodule = own_data(datamodule, client, federation)
        self.client = client
        self.folder = folder
        self.leaves = ""
        self._run_name = ""
        self._phase = ""
        self._said_phase, self._said = "", set[str]()
        self._initial = ""  # a digest of the tensors that the phase starts from
        self._initial_server: Tree = {}  # what the server need not send to clients that train alone
        self._masked: Any = None  # what was trained last, if it leaves only masked
        self._reported = Reported()

    def answer(self, message: Message) -> Message:
        """Answers a message, and tells whoever runs the client what goes on, each thing once."""
        if message.kind == SEVERAL:
            return answer_each(message, self.answer)
        if message.kind == "note":
            self._say(f"the server says: {one_line(message.values['text'])}")
            return Message("noted")
        phase = one_line(message.values.get("phase", self._said_phase))
        if phase != self._said_phase:
            self._said_phase, self._said = phase, set()
            self._say(f"phase '{phase}'")
        answer = self._answer(message)
        if answer.kind == "description":
            self._say(f"client {self.client} has described its data to the server")
        return answer

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            rank_zero_info(f"join: {text}.")

    def _answer(self, message: Message) -> Message:
        """The answer; an exception becomes one that says what kind it was."""
        answers: dict[str, Callable[[Message], Message]] = {
            "describe": self._describe,
            "prepare": self._prepare,
            "begin": self._begin,
            "request": self._request,
            "train": self._train,
            "train masked": self._train,
            **dict.fromkeys(("share", "mask", "confirm", "unmask"), self._take_step),
            "evaluate": self._evaluate,
            "read": self._read,
            "exchange": self._exchange,
            "finish": self._finish,
        }
        if message.kind not in answers:
            return self._failed("refused", f"it does not know messages of the kind '{message.kind}'")
        try:
            if message.kind not in ("describe", "prepare") and not self._is_in(message, "run"):
                return Message(UNPREPARED)
            if message.kind not in ("describe", "prepare", "begin") and not self._is_in(message, "phase"):
                return Message(NOT_BEGUN)
            if "round" in message.values and message.values["round"] > self._plan.training.rounds:
                raise BadMessageError(f"round {message.values['round']} is none of the phase")
            with one_thread():
                return answers[message.kind](message)
        except MisconfigurationException as error:
            return self._failed("configuration", str(error))
        except BadMessageError as error:
            return self._failed("refused", f"it refuses the message '{message.kind}': {error}")
        except DamagedFileError as error:
            return self._failed("file", str(error))
        except Exception as error:
            return self._failed(_kind_of(error), f"{type(error).__name__}: {error}")

    def _failed(self, kind: str, why: str) -> Message:
        """Says why it has failed to whoever runs the client, and only of what kind that is to the server."""
        self._say(f"this client has failed: {one_line(why).rstrip('.')}")
        return Message(FAILED, {"failure": kind})

    def _is_in(self, message: Message, key: str) -> bool:
        """Whether the client is in the message's run or phase, perhaps after it has read how it came there."""
        if message.values[key] != (self._run_name if key == "run" else self._phase):
            self._recall(key, message.values)
        return message.values[key] == (self._run_name if key == "run" else self._phase)

    def _remember(self, key: str, message: Message) -> None:
        """Writes the message that led into a run or a phase, for a process that takes this one's place."""
        write_file(self.folder / f"{key}.message", with_checksum(message.to_bytes()))

    def _recall(self, key: str, values: dict[str, Any]) -> None:
        """Goes into the run or the phase of the last such message, if it is the one that is asked for.

        If its file is damaged, the server sends it again.
        """
        path = self.folder / f"{key}.message"
        if not path.is_file() or (content := without_checksum(path.read_bytes())) is None:
            return
        with suppress(BadMessageError):
            message = Message.from_bytes(content)
            if all(message.values[name] == values[name] for name in {"run", key}):
                (self._prepare if key == "run" else self._begin)(message)

    def _describe(self, message: Message) -> Message:
        """What the server needs to know of the client's data and its configuration before the first round."""
        if self.client >= message.values.get("num_clients", math.inf):
            most = message.values["num_clients"] - 1
            self.leaves = f"client is {self.client}, but must be at most {most}, because the server counts from 0"
            return Message(LEAVES)
        return Message("description", described(self.federation, self.model, self.datamodule, self.client))

    def _prepare(self, message: Message) -> Message:
        """Makes the run, now that the number of clients and classes of the federation is known."""
        if not re.fullmatch("[0-9a-f]{32}", message.values["run"]):  # it becomes the name of a folder
            raise BadMessageError("the name of the run must be 32 hexadecimal digits")
        now = described(self.federation, self.model, self.datamodule, self.client)
        check_same(now, message.values["description"], [phase.name for phase in self.federation.phases])
        datamodule = copy.copy(self.datamodule)
        add_clients(datamodule, message.values["num_clients"], message.values["num_classes"])
        self.close()
        self._run_name = self._phase = ""  # until all that follows has succeeded
        self.run = self.federation.run_of_client(self.model, datamodule, self.folder)
        self.run.folder = files = self.folder / message.values["run"]
        write_own_client(files, self.client, datamodule)
        checkpoint = files / FILE
        self.run.writer = CheckpointWriter(checkpoint)
        self.run.states = load_federation(checkpoint, self.run.writer)["phases"] if checkpoint.is_file() else {}
        self._private = PrivateRounds(self.folder, message.values["run"], self.client)
        self._reported.begin(files)
        self._remember("run", message)
        self._run_name = message.values["run"]
        return Message("prepared")

    def _begin(self, message: Message) -> Message:
        """Plans a phase with the tensors that it starts from."""
        name = message.values["phase"]
        phase = next((phase for phase in self.run.phases if phase.name == name), None)
        if phase is None:
            raise BadMessageError(f"the run has no phase {name!r}")
        module = self.run.module(phase)
        initial = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
        training = self.run.local_training(phase, module, {**initial, **message.tensors})
        training = replace(
            training,
            algorithm=_receiving(phase.algorithm, training.aggregation is not None),
            rounds_before=message.values["rounds_before"],
        )
        if training.sample_privacy is not None:
            training = replace(training, secret_seed=self._private.begin(training))
            self._private.check_target(self.run, phase, training)
        own = OwnFiles(self.run, phase, self.client)
        initial_server = {} if phase.algorithm.federated else phase.algorithm.server_init(training.module)
        plan = self.run.backend.plan(training).begin(training)
        self._remember("phase", message)
        self._own, self._plan, self._initial_server, self._masked = own, plan, initial_server, None
        self._initial = digest_of(training.initial)
        self._phase = phase.name
        return Message("begun")

    def close(self) -> None:
        """Ends the processes that train this client together, if there are any."""
        if self._run_name:
            self.run.backend.close()

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint of the finished phases; None if there is none."""
        path = self.folder / self._run_name / FILE
        return path if self._run_name and path.is_file() else None

    def _server(self, message: Message) -> Tree:
        """The server's state, as far as the client needs it."""
        return {**self._initial_server, **message.tensors}

    def _cohort(self) -> Cohort:
        return cohort_of(self._own.phase, self.run.datamodule.num_clients, self.run.seed)

    def _check_takes_part(self) -> None:
        if self.client not in self._cohort().participants:
            raise BadMessageError(f"its own configuration says that it takes no part in phase '{self._phase}'")

    def _request(self, message: Message) -> Message:
        """What the client asks for: nothing if it takes no part, because then the server only evaluates it."""
        kept = self._own.read(message) if self.client in self._cohort().participants else {}
        return Message("requested", tensors=request_of(self._plan.training.algorithm, kept))

    def _train(self, message: Message) -> Message:
        secure, self._masked = self._plan.training.secure_aggregation, None
        if (message.kind == "train") != (secure is None):
            needs = "only masked" if secure is not None else "as they are"
            raise BadMessageError(f"its own configuration says that updates of phase '{self._phase}' leave it {needs}")
        self._check_takes_part()
        kept = {self.client: self._own.read(message)}
        self._private.add(self.run, self._plan.training, message)
        (group,) = self._plan.train_groups(self._server(message), [[self.client]], kept, message.values["round"])
        if group.update is None:
            failure = group.failed[self.client]
            kind = failure.kind if failure.error is None else _kind_of(failure.error)
            return self._failed(kind, failure.reason)
        values = {"weight": group.update.weight, "keeps": self._own.write(message, group.clients[self.client])}
        if secure is None:
            return Message("update", values, group.update.sent)
        kind = module_of_flower("join", "secure.masked_round").MaskedUpdate
        cohort, num_clients = self._cohort().size, self.run.datamodule.num_clients
        self._masked = kind(self.client, secure.threshold, message, group.update.sent, cohort, num_clients)
        return Message("trained", values, self._masked.keys)

    def _take_step(self, message: Message) -> Message:
        """A step of secure aggregation with what was trained last, which only this process has."""
        if self._masked is None:
            raise BadMessageError("it has trained nothing since it was started")
        return self._masked.answer(message)

    def _evaluate(self, message: Message) -> Message:
        """What the client's own configuration reports of an evaluation, of one model in a round."""
        round, point, kept = message.values["round"], message.values["evaluation_point"], self._own.read(message)
        phase = self._evaluated(point)
        is_scheduled = round > 0 and is_evaluated_after(self.run, phase, round)
        model = f"{self._initial} {digest_of(message.tensors, kept)}"
        asked = phase.name, round, point, model, is_scheduled
        said = without_values(self._plan.training, self.client)
        if names := self.federation.reports.names(self.run.phases, self.run.metrics):
            self._reported.check(*asked)
            evaluation = self._evaluation(message, kept, round, point)
            said = self.federation.reports.reported(evaluation, names, self._numbers_of_samples())
        self._reported.add(*asked, said)
        tensors = {} if said.gate_weights is None else {"gate_weights": said.gate_weights}
        return Message("evaluation", asdict(replace(said, gate_weights=None)), tensors)

    def _numbers_of_samples(self) -> dict[str, int]:
        """On how many samples each accuracy, and each metric whose name begins so, is computed."""
        training = self._plan.training
        data, opt_out = training.datamodule, training.algorithm.opt_out
        validation = opt_out.opted_in_of_all(data.validation_samples, training.seed, validation=True)
        own = {"local_test": data.test_samples, "validation": validation}
        numbers = {split: len(samples[self.client]) for split, samples in own.items()}
        return {**numbers, **dict.fromkeys(("reweighted_test", "global_test"), len(data.global_test))}

    def _evaluated(self, point: EvaluationPoint) -> Phase:
        """The phase; refuses one that is not evaluated at this point."""
        phase = self._own.phase
        if not (phase.evaluate and point in phase.evaluation_points):
            raise BadMessageError(f"clients are not evaluated {point!r} in phase '{self._phase}'")
        return phase

    def _evaluation(self, message: Message, kept: Tree, round: int, point: EvaluationPoint) -> ClientEvaluation:
        """The evaluation of the model that a message gives the client after so many rounds; all of it, for itself."""
        phase, receives = self._evaluated(point), self._plan.training.algorithm
        training = replace(self._plan.training, algorithm=phase.algorithm if needs_server_state(receives) else receives)
        of_client = {self.client: kept} if kept else {}
        (found,) = evaluate_clients(training, self._server(message), of_client, round, point, [self.client])
        return found

    def _finish(self, message: Message) -> Message:
        """Keeps a finished phase's result as a checkpoint, with which this machine works alone.

        The client evaluates it itself: the server knows only what was reported.
        """
        evaluations, kept = [], self._own.read(message)
        for point, values in zip(self._own.phase.evaluation_points, message.values["evaluations"], strict=False):
            own = replace(self._evaluation(message, kept, values["round"], point), gate_weights=None, gate_labels=None)
            evaluations.append(Evaluation(**{**values, "clients": [own]}))
        state = PhaseState(
            initial=self._plan.training.initial,
            server=self._server(message),
            clients={self.client: kept},
            evaluations=evaluations,
            finished=True,
            **message.values["state"],
            **self._spent(),
        )
        states = {**self.run.states, self._phase: state}
        self._own.finish(message)
        # in the order of the phases, although an earlier one may come late
        self.run.states = {phase.name: states[phase.name] for phase in self.run.phases if phase.name in states}
        self.run.save()
        return Message("finished", {"phases": [*states]})

    def _spent(self) -> dict[str, Any]:
        """Says what the phase has cost each sample, by this client's own count; empty without ``sample_privacy``."""
        privacy, phase = self._plan.training.sample_privacy, self._own.phase
        if privacy is None:
            return {}
        steps = self._private.steps([phase.name, *(before.name for before in self.run.phases_before(phase))])
        epsilon = privacy.epsilon(steps)
        text = f"each sample of this client has epsilon {epsilon:.3g} and delta {privacy.delta:.3g}"
        self._say(f"{text}, by this client's own count of its steps")
        return {"sample_epsilon": epsilon, "sample_delta": privacy.delta}

    def _read(self, message: Message) -> Message:
        """What the client gives to others in an exchange, as it is after its last training."""
        self._check_exchanges(message)
        if not self._own.are_newest(message):
            raise BadMessageError("clients exchange what they keep after their last training, and nothing older")
        algorithm, values = self._plan.training.algorithm, message.values
        given = given_to_others(algorithm, self._own.read(message), values["parts"], values["round"])
        return Message("given", tensors=given)

    def _exchange(self, message: Message) -> Message:
        """Keeps what follows from the tensors that the server and other clients sent."""
        self._check_exchanges(message)
        kept = self._own.read(message)
        keeps = after_exchange(self._plan.training.algorithm, self.client, kept, message.tensors)
        return Message("kept", {"keeps": self._own.write(message, keeps)})

    def _check_exchanges(self, message: Message) -> None:
        """Refuses an exchange of anything but what the client has trained in this phase.

        What it kept of earlier phases would otherwise become what it gives to others, without any training.
        """
        if not self._plan.training.algorithm.messages.exchanged:
            raise BadMessageError(f"clients exchange nothing in phase '{self._phase}'")
        self._check_takes_part()
        if any(phase != self._phase for phase, *_ in self._own.named(message)):
            raise BadMessageError(f"clients exchange only what they have trained in phase '{self._phase}'")


def _kind_of(error: Exception) -> str:
    """The nearest class of an exception that Python has, which no user has named."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")


def _receiving(algorithm: Algorithm, has_aggregation: bool) -> Algorithm:
    """A copy of an algorithm whose ``server`` is what its ``server_send`` returned on the server's machine."""
    receiving = copy.copy(algorithm)

    def server_send(server: Tree, client_id: int, request: Tree) -> Tree:
        added = PREFIX if has_aggregation else ()
        return {name: tensor for name, tensor in server.items() if not name.startswith(added)}

    receiving.server_send = server_send
    return receiving
