"""The hooks of a federated algorithm; their defaults are FedAvg.

The trees that hooks exchange hold tensors of two kinds. The module's tensors have the names of its state dict. The
algorithm's own tensors, such as control variates or prototypes, have names with a "/", for instance
``control/fc.weight``, which are not allowed in a module. Both kinds are sent, combined, kept and stored in the same
way, but only the module's tensors are loaded into a module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal, get_args

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.client import Client, Constants, Exchange, Update
from fedmoe_pl.algorithms.consent import OptOut
from fedmoe_pl.checks import InvalidArgumentError, check_choice, check_kind
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.trees import (
    Tree,
    changed,
    check_names,
    copies_of_parts,
    is_interchangeable,
    load_tree,
    mean_of_two,
    of_algorithm,
    of_module,
    problem_of_shapes,
    same_memory,
)

EvaluationPoint = Literal["local_training", "aggregation"]
"""What of a round comes before an evaluation: after it, clients' models are evaluated."""
Weighting = Literal["samples", "uniform"]
"""What an update weighs: the client's number of training samples that have a label, as in FedAvg, or 1."""
Need = Literal[
    "all_clients",
    "every_client",
    "validation_samples",
    "validation_samples_of_each",
    "classes",
    "loss_of_outputs",
    "plain_steps",
    "fresh_optimizers",
    "whole_batches",
    "step_of_each_batch",
    "own_server_step",
    "fixed_rounds",
    "fixed_gate",
]
"""What an algorithm may need, see ``needs`` of :class:`Algorithm`."""


@lru_cache(maxsize=10_000)  # every client of every round asks for the same names
def _matches(name: str, *patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class Patterns:
    """Names chosen by glob patterns such as ``global_expert.*``.

    Args:
        patterns: one pattern or several; ``*`` matches any characters, dots included.
        excluded: names that they do not choose.
        within: patterns that a name must match, too; None for any name.

    Example:
        >>> "global_expert.fc.weight" in Patterns("global_expert.*")
        True
    """

    def __init__(
        self, patterns: str | list[str], excluded: Collection[str] = (), within: Patterns | None = None
    ) -> None:
        self.patterns = [patterns] if isinstance(patterns, str) else patterns
        self.excluded = excluded
        self.within = within

    def __contains__(self, name: str) -> bool:
        """Whether the patterns choose the name."""
        is_left_out = name in self.excluded or (self.within is not None and name not in self.within)
        return not is_left_out and _matches(name, *self.patterns)

    def check(self, names: Iterable[str], argument: str, owner: str = "the model") -> None:
        """Refuses a pattern that matches nothing, because it is probably misspelt; messages name argument and owner."""
        names = list(names)
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                tops = ", ".join(_beside(pattern, names)) or "none"
                if any("_orig_mod." in name for name in names):
                    tops += ". torch.compile(layer) has put _orig_mod into names; layer.compile() does not"
                raise MisconfigurationException(
                    f"{argument} is '{pattern}', which matches no parameter of {owner}; it has {tops}."
                )


def _beside(pattern: str, names: Iterable[str]) -> list[str]:
    """The patterns that could stand where the first part of this one begins that matches no name."""
    while pattern:
        pattern, *_ = pattern.rpartition(".")
        stem = f"{pattern}." if pattern else ""
        if ends := {name.removeprefix(stem) for name in names if name.startswith(stem)}:
            return sorted({f"{stem}{end.partition('.')[0]}.*" if "." in end else stem + end for end in ends})
    return []


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Where the parts of a phase's module come from, and which of them its clients use.

    Attributes:
        needed: the parts that must come from an earlier phase, see ``Algorithm.missing_start``.
        copied: the parts that start as copies of others, each with the other's name; a ``start`` by parts must not
            name them. A client copies what it has itself, also where it keeps a part of the original to itself.
        computed: the parts that ``personal_tensors`` or ``server_send`` compute for a client's predictions, and that
            nobody keeps: a phase that starts from this one gets others. An empty name is that of the whole module.
        new_gate: whether every client draws a new gate in its own first round of the phase, and takes none from
            earlier phases.
        local_expert_predicts: whether clients predict with their ``local_expert`` alone, as in the paper, so that a
            phase with a gate that mixes experts gets a warning.
    """

    needed: Sequence[str] = ()
    copied: Mapping[str, str] = field(default_factory=dict)
    computed: Sequence[str] = ()
    new_gate: bool = False
    local_expert_predicts: bool = False


@dataclass(frozen=True, kw_only=True)
class Messages:
    """What clients and server send each other, where it is more or other than the new values of what is shared.

    Attributes:
        combined: whether the server combines what clients send; if not, a phase is evaluated after local training.
        changes: whether clients send the changes of the module's tensors, not their new values. A phase of such an
            algorithm takes no aggregation, which would take them for new values.
        weights: prefixes of the names of the algorithm's own tensors that are weights, and grow with the number of
            samples.
        per_client: prefixes of the names of the server's tensors that belong to single clients of the federation.
            They are sent only by a ``server_send`` of the algorithm's own, and not to clients outside of it.
        request: prefixes of the names of the tensors that a client keeps and sends to ask for others, such as the
            numbers of experts. Without any, clients ask for nothing.
        exchanged: prefixes of the names of the tensors that an ``exchange`` replaces. A client gives no other tensor to
            other clients, whoever asks for it.
        period: number of rounds after which the same kinds of tensors are sent again, from the second round on.
    """

    combined: bool = True
    changes: bool = False
    weights: tuple[str, ...] = ()
    per_client: tuple[str, ...] = ()
    request: tuple[str, ...] = ()
    exchanged: tuple[str, ...] = ()
    period: int = 1


class Algorithm:
    """What clients and server send each other, and how it is trained and combined; the defaults are FedAvg.

    State goes in and out by value: nothing that must survive a round may be stored on ``self``, on a module or on a
    worker. Only ``client_loss`` is differentiated; it must be pure (no logging, no ``.item()``).

    Args:
        shared: glob patterns of the parameters and buffers that clients send to the server.
        trainable: glob patterns of the parameters that are trained.
        weighting: what updates weigh in the average, see :data:`Weighting`.

    Raises:
        InvalidArgumentError: like all algorithms and aggregations, if an argument is out of its range.

    Attributes:
        federated: whether clients share anything; False if every client trains alone.
        evaluated_after: the part of a round after which clients' models are evaluated, as in the paper, by a phase that
            does not say otherwise. If clients train alone, it is always their local training.
        needs: what it needs; a phase that lacks some of it is refused before any training.

            * ``all_clients``: that all clients that take part in the phase train in every round.
            * ``every_client``: that the phase's ``clients`` leaves out no client, because its result is made of all.
            * ``validation_samples``: that clients have validation samples.
            * ``validation_samples_of_each``: that each client with training samples has validation samples.
            * ``classes``: that each sample has a class, which the module predicts.
            * ``loss_of_outputs``: the loss of an expert's outputs, apart from the module's own loss. Of modules other
              than mixtures, it is cross-entropy, which needs classes.
            * ``plain_steps``: that gradients are not clipped, because it computes with the steps of plain SGD.
            * ``fresh_optimizers``: that no optimizer is kept, because the parameter under a name may be another one in
              each round.
            * ``whole_batches``: that no ``trainer.strategy`` divides a client's batches, because its loss of a batch is
              not the mean of losses of its samples.
            * ``step_of_each_batch``: that no gradients are accumulated over batches, and no parameters averaged over
              steps.
            * ``own_server_step``: that no server optimizer and no aggregation takes the place of the server's step,
              because what the server sends is more, or something else, than means of parameters.
            * ``fixed_rounds``: that the phase's number of rounds (``client.rounds``), on which its rounds depend, stays
              the same, so that a run cannot be continued with more.
            * ``fixed_gate``: that the module's gate has no parameters, because it trains experts apart from the gate;
              an algorithm whose ``expert`` is empty, so that it trains the whole module, takes any.
        parts: where the parts of the module come from, a :class:`Parts`.
        messages: what is sent beside the new values of what is shared, a :class:`Messages`.
        samples_in_loss_only: whether a client's samples have no influence on what it sends or keeps but through the
            losses of its batches, and which samples it trains on is the same in every round. Only such algorithms can
            be trained with ``Phase.sample_privacy``, or with samples without a label, whose label is -100 in batches. A
            subclass must declare it anew.
        frozen_train_mode: whether modules without a trainable parameter stay in train mode, with active dropout, as in
            some official codes. Otherwise they are in eval mode.
        opt_out: clients and samples that influence nothing that leaves a client, an ``OptOut``; none by default.
        client_batches: an optional hook ``(client, batches)``: the batches of the client's local training, an epoch in
            each iteration. The client is as ``client_init`` left it; the batches are those of its ``client_samples``,
            shuffled and augmented, on which it trains without this hook. With it, clients are not stacked, and
            ``sample_privacy`` is refused.
        client_exchange: an optional hook ``(client_id, state, sent)``: the tensors that a client keeps in place of its
            own after an ``exchange``, without it those that it received. ``sent`` has what the server sent it, and what
            it received from others, with the sender's id and a dot before each name. It goes on to keep what is not
            replaced.
        validation_loss: an optional hook ``(module, batch, constants)``: the mean loss of validation samples, of shape
            (). ``constants`` is what ``client_init`` returned; empty for the model that a client would use now. Without
            it, it is the module's own loss, or that of the scores that ``predictor`` gives, without terms of the
            algorithm.
        predictor: an optional hook ``(client, server)``: how a client predicts, a function from samples (n, ...) to
            scores (n, C), such as the nearest prototype. It is evaluated without gradients. The client's module has the
            tensors that it would use now, in eval mode, on the device of the samples; other tensors are on the CPU.
            Without it, clients predict with their module.
    """

    federated: bool = True
    evaluated_after: EvaluationPoint = "aggregation"
    needs: tuple[Need, ...] = ()
    parts: Parts = Parts()
    messages: Messages = Messages()
    samples_in_loss_only: bool = False
    frozen_train_mode: bool = False
    opt_out: OptOut = OptOut()
    client_batches: Callable[..., Iterable[Any]] | None = None
    client_exchange: Callable[..., Tree] | None = None
    validation_loss: Callable[..., Tensor] | None = None
    predictor: Callable[..., Callable[[Tensor], Tensor]] | None = None

    def __init__(
        self, shared: str | list[str] = "*", trainable: str | list[str] = "*", weighting: Weighting = "samples"
    ) -> None:
        check_choice(self, "weighting", weighting, get_args(Weighting))
        for name, patterns in (("shared", shared), ("trainable", trainable)):
            listed = patterns if isinstance(patterns, list | tuple) else [patterns]
            if not all(isinstance(each, str) for each in listed):
                allowed = "a pattern of names, such as 'global_expert.*', or a list of patterns"
                raise InvalidArgumentError(self, name, patterns, allowed)
        self.shared = Patterns(shared)
        self.trainable = Patterns(trainable)
        self.weighting: Weighting = weighting

    def missing_start(self, earlier: Sequence[Algorithm], part: str = "") -> str:
        """What a phase with ``parts.needed`` lacks in the phases it starts from: by default, a federated phase.

        Without a ``start`` of its own, such a phase starts from the last one that alone lacks nothing.

        Args:
            earlier: the algorithm of the phase that ``start`` names, of the one which that phase starts from, and so
                on, at least one.
            part: the one of ``parts.needed`` that ``start`` takes from there; empty if it takes the whole model.

        Returns:
            Words for the refusal, such as "a phase of Local"; empty if nothing is missing.
        """
        return "" if any(other.federated for other in earlier) else "a federated phase"

    def is_shared(self, name: str) -> bool:
        """Whether clients send the parameter or buffer to the server: ``shared`` has its name."""
        return self.federated and name in self.shared

    def is_trainable(self, name: str, round: int, epoch: int) -> bool:
        """Whether the parameter is trained in a local epoch of a round, both counted from 0."""
        return name in self.trainable

    def server_init(self, module: LightningModule) -> Tree:
        """The server's state before the first round, from the phase's module: what is shared, and the copied parts.

        Refuses a module that the algorithm cannot train, because it is also called before any training. By default,
        these are one in which a pattern of ``shared`` or ``trainable`` matches no tensor, one with a tensor whose name
        contains a "/", and one that lacks some of ``parts.needed``, or has others than ``parts.copied``.
        """
        check_names(module)
        check_copied_parts(module, self.parts.copied)
        for part in self.parts.needed:
            module.get_submodule(part)
        state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
        fixed_gate = ["gate."] if hasattr(module, "gate") else []  # it has no parameters
        self.trainable.check([*state, *fixed_gate], f"{type(self).__name__}: trainable")
        self.shared.check(state, f"{type(self).__name__}: shared")
        shared = {name: tensor for name, tensor in state.items() if self.is_shared(name)}
        shared |= copies_of_parts(state, self.parts.copied)
        frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
        return {name: tensor if name in frozen else tensor.clone() for name, tensor in shared.items()}

    def server_begin(self, server: Tree, clients: Iterable[Client]) -> Tree:
        """The server's state before the first round, now that clients can be asked; by default unchanged.

        What is sent and computed for it is not counted.

        Args:
            server: what ``server_init`` returned.
            clients: the clients of the first round, whose modules have the phase's initial tensors and may be changed.
        """
        return server

    def server_send(self, server: Tree, client_id: int, request: Tree) -> Tree:
        """The tensors that a client receives, given its request; by default all but ``messages.per_client``."""
        return {name: tensor for name, tensor in server.items() if not name.startswith(self.messages.per_client)}

    def client_samples(self, client: Client) -> Tensor:
        """Indices of the samples that the client trains on in this round; by default, all that are opted in."""
        return self.opt_out.opted_in(client.id, client.samples, client.seed)

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Loads the tensors that were sent and kept, and draws a new gate if ``parts.new_gate``.

        Returns:
            Constants for the loss, with tensors on the CPU.
        """
        load_tree(client.module, of_module({**sent, **client.state}))
        if self.parts.new_gate and begins(self, client, "gate."):
            client.module.gate.reset_parameters()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        return {}

    def client_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """The local loss, of shape (); by default the first value of the module's ``loss(batch)``."""
        return module.loss(batch)[0]  # pyright: ignore[reportCallIssue]

    def client_final(self, client: Client, constants: Constants) -> Update:
        """The tensors that the client sends and keeps after its training, and its weight, as ``weighting`` says.

        By default, it sends those that are shared, and keeps others that have changed. Any machine that knows the
        client's number of samples can compute the weight: the server of a deployed federation leaves out updates with
        another one.
        """
        sent = copies(client, filter(self.is_shared, client.module.state_dict()))
        weight = weight_of(self, client.id, client.samples, client.seed, client.datamodule)
        return Update(sent, weight, private_tensors(self, client))

    def problem_of_update(
        self, client_id: int, update: Update, initial: Tree, datamodule: FederatedDataModule, round: int
    ) -> str:
        """Why a client cannot have made an update, in words such as "has no gate.bias"; empty if it can.

        The server of a deployed federation asks, and leaves such updates out. By default, an update has the module's
        shared tensors. An algorithm that sends others, or weights of its own among them, overrides this.

        Args:
            client_id: the client's id.
            update: its update, of finite values, with the weight of its samples; tensors of the module have the shapes
                and data types that they have there.
            initial: the phase's initial tensors of the client's module.
            datamodule: stands for the data of all clients: how many samples and classes there are.
            round: the round of the phase, counted from 0.
        """
        return problem_of_shapes(update.sent, shapes_of_shared(self, initial))

    def combine(self, a: Update, b: Update) -> Update:
        """Folds two updates into one; by default, their weighted mean, so that only one model is in memory.

        It must be associative and commutative, because backends choose the groups and their order. An algorithm that
        needs each client's update collects them by client.
        """
        if len(a.sent) < len(b.sent):
            a, b = b, a  # or what only b sends would be left out, not refused
        return Update(mean_of_two(a.sent, a.weight, b.sent, b.weight), a.weight + b.weight)

    def server_update(self, server: Tree, combined: Update) -> Tree:
        """The server's next state."""
        return {**server, **combined.sent}

    def server_final(self, server: Tree, is_last: bool) -> Tree | None:
        """The phase's result, given the server's state after a round; None if the phase goes on.

        By default, it is the state after the last round, unchanged. A phase may also end before: ``is_last`` says
        whether it would go on. It may be called again with its own result, which must not change it.
        """
        return server if is_last else None

    def exchange(self, server: Tree, clients: Collection[int], round: int) -> Exchange:
        """Who receives what at the end of a round, after the server's update; by default nobody.

        In a deployed federation, a client that has not trained in the phase yet neither gives nor receives anything.

        Args:
            server: the server's new state.
            clients: ids of the clients that take part: those that keep anything, without those that failed.
            round: the round, counted from 0.

        Yields:
            A client, the tensors that the server sends it, and by sender's id the parts of modules, such as
            ``experts.3``, that it receives from other clients as they are after local training. Clients keep all
            tensors of such parts, and ``messages.exchanged`` declares them.
        """
        yield from ()

    def personal_tensors(self, client: Client, server: Tree) -> Tree:
        """The tensors of the model that a client would use now: those that it kept, and the others from the server.

        The client has the phase's module with its initial tensors.
        """
        return of_module({**received(self, server, client.id, client.state), **client.state})


def check_declarations(algorithm: Algorithm) -> None:
    """Refuses declarations of other kinds."""
    for name, kind in (("parts", Parts), ("messages", Messages), ("opt_out", OptOut)):
        check_kind(algorithm, name, getattr(algorithm, name), kind)
    for need in algorithm.needs:
        check_choice(algorithm, "needs", need, get_args(Need))


def check_copied_parts(module: LightningModule, parts: Mapping[str, str]) -> None:
    """Refuses a part that cannot start as a copy of another one; ``parts`` has the original of each."""
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    for part, original in parts.items():
        copied = copies_of_parts(shapes, {part: original})
        if not copied or copied != {name: shape for name, shape in shapes.items() if name.startswith(f"{part}.")}:
            because = f"it starts as a copy of {original}; leave {part} out to get this"
            allowed = f"of the architecture of {original}"
            raise InvalidArgumentError(module, part, getattr(module, part, None), allowed, because)


def request_of(algorithm: Algorithm, state: Mapping[str, Tensor]) -> Tree:
    """What a client sends to ask the server for tensors, of those that it keeps."""
    prefixes = algorithm.messages.request
    return {name: state[name] for name in state if name.startswith(prefixes)} if prefixes else {}


def received(algorithm: Algorithm, server: Tree, client_id: int, state: Tree) -> Tree:
    """The tensors that a client receives in answer to its request."""
    return algorithm.server_send(server, client_id, request_of(algorithm, state))


def begins(algorithm: Algorithm, client: Client, prefix: str) -> bool:
    """Whether a client draws or chooses a part of its module now, in its first round; it keeps the part from then on.

    A part that it shares begins in the phase's first round.
    """
    if client.round == 0:
        return True
    own = [name for name in client.module.state_dict() if name.startswith(prefix) and not algorithm.is_shared(name)]
    return bool(own) and client.state.keys().isdisjoint(own)


def weight_of(
    algorithm: Algorithm, client_id: int, samples: Tensor, seed: int, datamodule: FederatedDataModule
) -> float:
    """The weight of a client's update, given its training samples."""
    if algorithm.weighting != "samples":
        return 1
    return len(datamodule.labelled(algorithm.opt_out.opted_in(client_id, samples, seed)))


def sees_losses_only(algorithm: Algorithm) -> bool:
    """Whether samples have no influence but through the losses of batches, as the algorithm's own class declares."""
    return algorithm.samples_in_loss_only and "samples_in_loss_only" in vars(type(algorithm))


def copies(client: Client, names: Iterable[str]) -> Tree:
    """Tensors of a client's module on the CPU: copies of them, or what it received where that is the same."""
    state = client.module.state_dict(keep_vars=True)
    return {
        name: client.loaded[name]
        if name in client.loaded and _is_unchanged(client.loaded[name], state[name])
        else state[name].detach().cpu().clone()
        for name in names
    }


def _is_unchanged(received: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor is what was received; of those that are trained, none is compared."""
    return same_memory(received, tensor) or (not tensor.requires_grad and is_interchangeable(received, tensor))


def private_tensors(algorithm: Algorithm, client: Client) -> Tree:
    """The changed tensors of a client's module that it does not share, and the algorithm's own that it keeps."""
    private = {name: tensor for name, tensor in client.module.state_dict().items() if not algorithm.is_shared(name)}
    return changed(private, client.loaded, client.state) | of_algorithm(client.state)


def shapes_of_shared(algorithm: Algorithm, tensors: Tree) -> dict[str, Sequence[int | None]]:
    """The shapes of those tensors of a module that clients send, by name."""
    return {name: tensor.shape for name, tensor in tensors.items() if algorithm.is_shared(name)}


def asks_clients(algorithm: Algorithm, server: Tree) -> bool:
    """Whether ``server_begin`` uses more of the clients than their number of rounds; also if it fails otherwise."""
    nobody = SimpleNamespace(id=0, round=0, rounds=1, rounds_before=0, seed=0)
    try:
        algorithm.server_begin(server, [nobody])  # pyright: ignore[reportArgumentType]
    except Exception:
        return True
    return False


def overrides(algorithm: Algorithm, hook: str) -> bool:
    """Whether the algorithm has a hook of its own in place of the default."""
    return getattr(type(algorithm), hook) is not getattr(Algorithm, hook)


def averages(algorithm: Algorithm) -> bool:
    """Whether the server needs no more than the weighted mean of what clients send after their training."""
    return algorithm.federated and not overrides(algorithm, "combine")


def sends_more(algorithm: Algorithm, server: Tree) -> list[str]:
    """What has clients send more than their updates; ``server`` is the server's state before the first round."""
    hooks = [declared for declared in ("request", "exchanged") if getattr(algorithm.messages, declared)]
    return hooks + (["server_begin"] if asks_clients(algorithm, server) else [])


def chooses_model(algorithm: Algorithm) -> bool:
    """Whether clients' models may differ although all received the same tensors and kept none."""
    return overrides(algorithm, "personal_tensors")


def needs_server_state(algorithm: Algorithm) -> bool:
    """Whether a client's model, or how it predicts, may follow from more than what the client received and kept."""
    return chooses_model(algorithm) or algorithm.predictor is not None
