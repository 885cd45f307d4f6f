"""What would leave the clients of a federation, from a dry run of its first rounds."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from textwrap import fill
from typing import Any, cast

import torch

from fedmoe_pl.aggregation import CollectingAggregation
from fedmoe_pl.algorithms.algorithm import averages
from fedmoe_pl.algorithms.client import Client, Update
from fedmoe_pl.backends import Transfer
from fedmoe_pl.backends.backend import GroupUpdate, Plan, group_updates
from fedmoe_pl.backends.fitting import one_thread
from fedmoe_pl.backends.local_client import begin_client, end_client, trainable_names
from fedmoe_pl.backends.traffic import WEIGHT, Direction
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.data.client_samples import ClientSamples
from fedmoe_pl.deployment.reports import Reports
from fedmoe_pl.deployment.schema import ANSWER_TO, carried
from fedmoe_pl.evaluation.outputs import has_trained_gate
from fedmoe_pl.phases.client_failures import ClientFailures
from fedmoe_pl.phases.participation import cohort_of
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.begin import first_clients
from fedmoe_pl.rounds.evaluate import is_evaluated_after
from fedmoe_pl.rounds.fit import draw_cohort, run_round
from fedmoe_pl.rounds.run import FederationCallback, Run
from fedmoe_pl.setup.data import measured
from fedmoe_pl.trees import Tree, copy_module

_NOISE = 1e-3


class DryPlan(Plan):
    """Calls all hooks of a round, but adds noise to the parameters instead of training them.

    Every parameter that would be trained thus changes, and clients keep and send it. Noise has full rank: what an
    algorithm compresses is never larger after real training.

    Attributes:
        weights: each client's weight in its last update, and the number of samples that it would train on.
    """

    def __init__(self, training: LocalTraining) -> None:
        super().__init__(training, "nothing is trained")
        self.weights: dict[int, tuple[float, int]] = {}

    def train_groups(
        self, server: Tree, groups: Sequence[Sequence[int]], kept: Mapping[int, Tree], round: int
    ) -> list[GroupUpdate]:
        """Adds noise to one client after another."""
        with one_thread():
            updates = {client: self._update(server, client, kept, round) for group in groups for client in group}
            return group_updates(self.training, groups, updates)

    def _update(self, server: Tree, client_id: int, kept: Mapping[int, Tree], round: int) -> Update:
        training = self.training.of(client_id)
        module = copy_module(training.module)
        client, constants, samples = begin_client(training, module, server, client_id, kept, round)
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name in trainable_names(training, module, round):
                parameters[name].add_(torch.rand_like(parameters[name]) - 0.5, alpha=_NOISE)
                client.steps = 1
        update = end_client(training, client, constants)
        self.weights[client_id] = update.weight, len(samples)
        return update


_WIDTH = 28
_TITLES: dict[Direction, str] = {
    "requests": "a client asks the server",
    "down": "the server sends a client",
    "up": "a client sends the server",
    "between_clients": "a client gets from others",
}
_LEGEND = """\
From a dry run of the first rounds with the federation's own clients; nothing was trained. Names end in * if all tensors
of that part are meant. Sizes are those of one client in one round, before any transport encoding. In a simulation,
whoever runs it sees everything; "the server" and "other clients" are those of the federation."""
_MESSAGES = """\
Messages of a deployment (fedmoe serve and join), each with its answer below: what they carry beside the run, the phase
and the round that they are about. Tensors are those above. In an evaluation, nan replaces what is not reported."""
_SAMPLES = 8  # of each client; what is sent does not depend on how many there are
_OF_SAMPLES = ("samples", "batches", "shuffled_samples")  # attributes of a client that give its samples
_PUBLIC = ("num_clients", "num_classes")  # attributes of the data that say nothing of a client


@dataclass
class PhaseAudit:
    """What leaves the clients in a phase, and what stays with them.

    Attributes:
        phase: the phase.
        num_clients: number of clients of the federation.
        participants: number of clients from which cohorts are drawn.
        cohort: number of clients in a round; with Poisson sampling, the expected one.
        transfers: what was sent in the first rounds, a list for each.
        stays: names of the tensors that stay with their client: those of the module that it does not receive from the
            server either, and those that the algorithm keeps.
        frozen: names of the module's tensors that it freezes itself, so that they are the same everywhere for ever.
        may_leave: names of the module's tensors that the algorithm shares, too: it sends them depending on the clients'
            data, or something that it computes from them.
        before: what the server used before the first round without its being sent, in words.
        weight: what the weight of a client's update is, in words; empty if none is sent.
        only_mean: whether the server needs only the weighted mean of the updates.
        names: names of the module's tensors.
        reported: names of what a client of a deployed federation reports of an evaluation, if its configuration is this
            one.
        reports: after how many rounds and at how many points of each, and what bounds it, in words.
    """

    phase: Phase
    num_clients: int
    participants: int
    cohort: int
    transfers: list[list[Transfer]] = field(default_factory=list)
    stays: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    may_leave: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    weight: str = ""
    only_mean: bool = False
    names: list[str] = field(default_factory=list)
    reported: list[str] = field(default_factory=list)
    reports: str = ""


class _Recorder(FederationCallback):
    """Collects what is sent in each round."""

    def __init__(self) -> None:
        self.transfers: list[list[Transfer]] = []

    def on_transfers(self, run: Run, phase: Phase, round: int, transfers: list[Transfer]) -> None:
        self.transfers.append(transfers)


def audit_run(run: Run, reports: Reports) -> list[PhaseAudit]:
    """Runs the first rounds of every phase dry: as they would be run, but nothing is trained, evaluated or written.

    Clients have a few of their samples. Phases in which clients train alone have one client of each architecture.
    """
    dry = replace(
        run,
        phases=[replace(phase, evaluate=False, select=None) for phase in run.phases],
        enable_checkpointing=False,
        failures=ClientFailures(),  # nobody drops out
        training_data=_with_few_samples(run.datamodule),
        given_results=dict(run.given_results),
        states={},
        callbacks=[recorder := _Recorder()],
    )
    audits = [
        _audit_phase(dry, phase, original, recorder) for phase, original in zip(dry.phases, run.phases, strict=True)
    ]
    for audit in audits:
        _describe_reports(audit, run, reports)
    return audits


def _describe_reports(audit: PhaseAudit, run: Run, reports: Reports) -> None:
    """Says what a client of a deployed federation reports of evaluations."""
    phase, module, names = audit.phase, run.module(audit.phase), reports.names(run.phases, run.metrics)
    rounds = [round for round in range(1, phase.rounds + 1) if is_evaluated_after(run, phase, round)]
    if phase.evaluate:
        found = [*measured(run.datamodule, run.metrics, [module]), *["gate_weights"] * has_trained_gate(module)]
        audit.reported = [name for name in found if name in names]
    number, points = len(rounds) or 1, len(phase.evaluation_points)
    audit.reports = f"of one model after {number} of {phase.rounds} rounds" + ", at two points of each" * (points - 1)
    if reports.digits is not None:
        audit.reports += f"; {reports.digits} digits"
    if reports.min_samples > 1:
        audit.reports += f"; on at least {reports.min_samples} samples"


def _audit_phase(dry: Run, phase: Phase, original: Phase, recorder: _Recorder) -> PhaseAudit:
    algorithm, num_clients = phase.algorithm, dry.datamodule.num_clients
    module = dry.module(phase)
    state = dry.state_of(phase, module)
    training = dry.local_training(phase, module, state.initial)
    drawn = cohort_of(phase, num_clients, dry.seed)
    audit = PhaseAudit(original, num_clients, len(drawn.participants), drawn.size, names=[*module.state_dict()])
    if state.round == phase.rounds:  # the result comes from a checkpoint
        _describe_stays(audit, training, _kept_by(state), set())
        return audit
    plan, recorder.transfers = DryPlan(training), []
    if state.server_learns:
        state.aggregation = {} if phase.aggregation is None else phase.aggregation.begin()
        cohort = draw_cohort(dry, phase)
        used: dict[str, None] = {}
        clients = first_clients(replace(training, datamodule=dry.datamodule), cohort, state.clients)
        state.server = algorithm.server_begin(state.server, _watched(clients, dry.datamodule, len(cohort), used))
        audit.before = [*used]
    alone = None if algorithm.federated else [first for first, *_ in training.by_architecture(range(num_clients))]
    for _ in range(min(phase.rounds, algorithm.messages.period + 1)):
        if not state.stopped:
            # Poisson sampling may draw nobody
            cohort = alone or draw_cohort(dry, phase) or drawn.participants[:1]
            run_round(dry, phase, plan, None, cohort)
    audit.transfers = recorder.transfers
    _describe(audit, training, plan, _kept_by(state))
    if state.round < phase.rounds:
        state.server = algorithm.server_final(state.server, is_last=True) or state.server
    state.finished = True
    return audit


def _describe(audit: PhaseAudit, training: LocalTraining, plan: DryPlan, kept: set[str]) -> None:
    """Says what stays, what may leave, and what the weights are."""
    phase, algorithm = audit.phase, audit.phase.algorithm
    sent = [each for transfers in audit.transfers for each in transfers if each.direction != "down"]
    leaving = {_own_name(each) for each in sent}
    exchanged = {without_numbers(_own_name(each)) for each in sent if each.direction == "between_clients"}
    audit.may_leave = [
        name
        for name in audit.names
        if name not in leaving and (algorithm.is_shared(name) or without_numbers(name) in exchanged)
    ]
    received = {each.tensor for transfers in audit.transfers for each in transfers if each.direction == "down"}
    _describe_stays(audit, training, kept, {*leaving, *audit.may_leave, *received})
    audit.stays += ["optimizer/*"] if phase.train.keep_optimizer else []
    audit.only_mean = averages(algorithm) and not isinstance(phase.aggregation, CollectingAggregation)
    if any(each.tensor == WEIGHT for each in sent):
        weights = plan.weights.values()
        counted = "its number of training samples" if all(n == size for n, size in weights) else "a number"
        audit.weight = "1, the same for all" if all(weight == 1 for weight, _ in weights) else counted


def _describe_stays(audit: PhaseAudit, training: LocalTraining, kept: set[str], others: set[str]) -> None:
    """Says what stays and what is frozen, given what clients keep, and the tensors that are on their way."""
    frozen = {*_frozen_by(training)} - kept - others
    audit.frozen = [name for name in audit.names if name in frozen]
    audit.stays = [name for name in audit.names + sorted(kept - {*audit.names}) if name not in frozen | others]


def _kept_by(state: PhaseState) -> set[str]:
    return {name for tree in state.clients.values() for name in tree}


def _frozen_by(training: LocalTraining) -> Iterator[str]:
    """Names of the parameters that the module has frozen, and of the buffers of such parts, which are in eval mode."""
    module = training.module
    yield from (name for name, parameter in module.named_parameters() if not parameter.requires_grad)
    parts = {name: module.get_submodule(name) for name in training.frozen_modules}
    for name, part in parts.items():
        if not any(parameter.requires_grad for parameter in part.parameters()):
            yield from (f"{name}.{buffer}" for buffer, _ in part.named_buffers())


def _own_name(transfer: Transfer) -> str:
    """A tensor's name at the client that sent it."""
    return transfer.tensor.partition(".")[2] if transfer.direction == "between_clients" else transfer.tensor


def without_numbers(name: str) -> str:
    """The name with a star in place of every number between dots and slashes, such as that of an expert or a client.

    Example:
        >>> without_numbers("experts.12.fc1.weight"), without_numbers("features/3")
        ('experts.*.fc1.weight', 'features/*')
    """
    return re.sub(r"(?<=[./])\d+(?=[./]|$)", "*", name)


def _with_few_samples(datamodule: FederatedDataModule) -> FederatedDataModule:
    few, parts = copy.copy(datamodule), datamodule.train_samples
    samples = [samples[:_SAMPLES] for samples in parts]
    few.train_samples = ClientSamples(torch.cat(samples), parts.sizes.clamp(max=_SAMPLES))
    return few


def _watched(
    clients: Iterable[Client], datamodule: FederatedDataModule, number: int, used: dict[str, None]
) -> Iterator[Client]:
    """The clients; what an algorithm uses of them and of their data is noted in words, each thing once."""

    def of_client(name: str) -> None:
        if name in _OF_SAMPLES:
            used[f"what the algorithm computes from training samples of {number} clients"] = None
        if name == "state":
            used[f"tensors that {number} clients kept from earlier phases"] = None

    def of_data(name: str) -> None:
        if name not in _PUBLIC:
            used[f"{name} of all {datamodule.num_clients} clients"] = None

    for client in clients:
        yield cast(Client, _Watched(client, of_client, {"datamodule": _Watched(datamodule, of_data)}))


class _Watched:
    """Gives an object's attributes, of which others may take the place, and says which are asked for."""

    def __init__(self, watched: object, note: Callable[[str], None], others: Mapping[str, object] = {}) -> None:
        self._watched, self._note, self._others = watched, note, others

    def __getattr__(self, name: str) -> Any:
        self._note(name)
        return self._others[name] if name in self._others else getattr(self._watched, name)


def format_audit(audits: Sequence[PhaseAudit], datamodule: FederatedDataModule) -> str:
    """The text that ``fedmoe audit`` prints, without a final newline."""
    blocks = ["\n".join(_of_phase(audit)) for audit in audits]
    return "\n\n".join([_LEGEND, *blocks, "\n".join(_of_data(datamodule)), "\n".join(_of_messages())])


def _of_phase(audit: PhaseAudit) -> list[str]:
    phase, kind = audit.phase, type(audit.phase.algorithm).__name__
    name = phase.name if phase.name == kind else f"{phase.name} ({kind})"
    lines = [f"{name}: {_rounds(audit)}"]
    if audit.before:
        used = "; ".join(audit.before)
        lines.append(_row("before the first round", f"the server uses {used} (not counted as traffic)"))
    for direction, title in _TITLES.items():
        for index, sent in enumerate(_of_rounds(audit, direction)):
            lines.append(_row(title if not index else "  in later rounds", _contents(audit, sent)))
        if direction == "up":
            lines += _of_updates(audit)
    if not audit.transfers:
        lines.append(_row("leaves a client", "nothing"))
    told = f"{', '.join(audit.reported)}; {audit.reports}" if audit.reported else "nothing"
    lines.append(_row("reports, if deployed", told))
    lines.append(_row("stays with its client", ", ".join(_patterns(audit.stays, audit.names)) or "nothing"))
    if audit.frozen:
        number = "1 tensor" if len(audit.frozen) == 1 else f"{len(audit.frozen)} tensors"
        told = f"{number}, which nobody changes and no client sends; if deployed, the server does, when a phase begins"
        lines.append(_row("frozen by the model", told))
    if phase.monitor:
        samples = "validation" if phase.monitor.startswith("validation") else "test"
        lines.append(
            _row("selection of the round", f"{phase.monitor}, a number of each participant, on {samples} samples")
        )
    return lines


def _of_updates(audit: PhaseAudit) -> list[str]:
    """What the clients' updates may have beside what the dry run had, and what the server makes of them."""
    lines = []
    if audit.may_leave and audit.transfers:
        lines.append(_row("  also shared", ", ".join(_patterns(audit.may_leave, audit.names))))
    if audit.weight:
        lines.append(_row("  with the weight", audit.weight))
        aggregation = audit.phase.aggregation
        way = "in its own way" if aggregation is None else f"with {type(aggregation).__name__}, one by one"
        needs = "needs only their weighted mean" if audit.only_mean else f"combines them {way}"
        if audit.phase.secure is not None:
            least = audit.phase.secure.needed(audit.cohort)
            needs = f"sees only the sum of at least {least}, because each is masked; it sees the weights"
        lines.append(_row("of the updates, the server", needs))
    return lines


def _rounds(audit: PhaseAudit) -> str:
    rounds = "1 round" if audit.phase.rounds == 1 else f"{audit.phase.rounds} rounds"
    if audit.phase.ckpt_path:
        return "the result comes from a checkpoint"
    out = audit.num_clients - audit.participants
    opted_out = f"; {out} of the {audit.num_clients} clients opt out" if out else ""
    return f"{audit.cohort} of {audit.num_clients} clients, {rounds}{opted_out}"


def _of_rounds(audit: PhaseAudit, direction: Direction) -> list[list[Transfer]]:
    """What was sent in the first round and in later ones, together if they have the same tensors."""
    first, *later = [[each for each in sent if each.direction == direction] for sent in audit.transfers] or [[]]
    rest = [each for sent in later for each in sent]
    kinds = [{(without_numbers(_own_name(each)), each.shape) for each in sent} for sent in (first, rest)]
    if not later or kinds[0] == kinds[1]:
        return [first] if first else []
    return [first, rest]


def _contents(audit: PhaseAudit, sent: Iterable[Transfer]) -> str:
    """The tensors of some transfers, and their size."""
    sent = [each for each in sent if each.tensor != WEIGHT]
    if not sent:
        return "nothing"
    shapes: dict[str, dict[str, None]] = {}  # of tensors that are not the module's
    for each in sent:
        shape = "x".join(map(str, each.shape))
        shapes.setdefault(without_numbers(_own_name(each)), {})[f"{shape} {each.dtype}".lstrip()] = None
    found = _patterns({_own_name(each): None for each in sent}, audit.names)
    named = [f"{name} ({' or '.join(shapes[name])})" if "/" in name and name in shapes else name for name in found]
    return f"{', '.join(named)}: {_sizes(sent)}"


def _sizes(sent: Iterable[Transfer]) -> str:
    """The bytes of one client in one round: the least and the most."""
    sums: dict[int, dict[str, int]] = {}
    for each in sent:
        sizes = sums.setdefault(each.client, {})
        sizes[each.tensor] = max(sizes.get(each.tensor, 0), each.bytes)
    totals = [sum(sizes.values()) for sizes in sums.values()]
    least, most = (_bytes(size) for size in (min(totals), max(totals)))
    return most if least == most else f"{least} to {most}"


def _bytes(size: int) -> str:
    """The size in a unit that people read.

    Example:
        >>> _bytes(999), _bytes(1000), _bytes(123_456_789)
        ('999 bytes', '1.0 kB', '123.5 MB')
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"


def _patterns(chosen: Iterable[str], names: Sequence[str]) -> list[str]:
    """The chosen names, in which a star stands for all names with a beginning, or for numbers.

    Example:
        >>> names = ["expert.body.w", "expert.body.b", "expert.head.w", "gate.w"]
        >>> _patterns(["expert.body.w", "expert.body.b", "gate.w", "own/expert.head.w", "sums/3"], names)
        ['expert.body.*', 'gate.*', 'own/expert.head.*', 'sums/*']
    """
    given, patterns, others = dict.fromkeys(chosen), dict[str, None](), dict[str, None]()
    for name in given:
        before, slash, own = name.rpartition("/")
        if own not in names:
            others[without_numbers(name)] = None
            continue
        parts, pattern = own.split("."), own
        for end in range(len(parts) - 1, 0, -1):
            start = ".".join(parts[:end])
            if not all(f"{before}{slash}{each}" in given for each in names if each.startswith(f"{start}.")):
                break
            pattern = f"{start}.*"
        patterns[f"{before}{slash}{pattern}"] = None
    return [*patterns, *others]


def _of_data(datamodule: FederatedDataModule) -> list[str]:
    """What all phases learn of the clients' data before any round."""
    lines = ["All phases: known before the first round (not counted as traffic)"]
    samples = "all training samples" if datamodule.learn_from is None else "all training samples that opt in"
    if datamodule.has_learned:
        what = "the vocabulary" if datamodule.normalization is None else "mean and standard deviation of each channel"
        lines.append(_row(what, f"computed from {samples}"))
    lines.append(
        _row("number of classes", "the largest label of all samples; in a deployment, each client sends its own")
    )
    return lines


def _of_messages() -> list[str]:
    """What the messages of a deployed federation carry, of every kind."""
    lines, carries = [_MESSAGES], carried()
    answers = [answer for answer in carries if answer not in {*ANSWER_TO, *ANSWER_TO.values()}]
    for kind, answer in [*ANSWER_TO.items(), *(("", answer) for answer in answers)]:
        if kind in carries:
            lines.append(_row(kind, ", ".join(carries[kind]) or "nothing else"))
        title = f"  {answer}" if kind in carries else f"  or to any: {answer}"
        lines.append(_row(title, ", ".join(carries[answer]) or "nothing else"))
    return lines


def _row(title: str, text: str) -> str:
    first, others = f"  {title:<{_WIDTH}}", " " * (_WIDTH + 2)
    return fill(
        text, 120, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )
