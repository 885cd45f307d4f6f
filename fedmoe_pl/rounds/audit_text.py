"""An audit as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedmoe_pl.backends import Transfer
from fedmoe_pl.backends.traffic import WEIGHT, Direction
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.rounds.audit import PhaseAudit, own_name, without_numbers

_WIDTH = 28
_CHARACTERS = 120
_TITLES: dict[Direction, str] = {
    "requests": "a client asks the server",
    "down": "the server sends a client",
    "up": "a client sends the server",
    "between_clients": "a client gets from others",
}
_LEGEND = """\
From a dry run of the first rounds with the federation's own clients; nothing was trained. Names end in * if all tensors
of that part are meant. Sizes are those of one client in one round, before any transport encoding. Whoever runs the
simulation sees everything; "the server" and "other clients" are those of the federation that is simulated. Results,
such as clients.csv and the clients' checkpoints, are written on this machine."""


def format_audit(audits: Sequence[PhaseAudit], datamodule: FederatedDataModule) -> str:
    """The text that ``fedmoe audit`` prints.

    Args:
        audits: the audits of all phases.
        datamodule: the data and the clients that hold them; already set up.

    Returns:
        Plain text without a final newline.
    """
    blocks = ["\n".join(_of_phase(audit)) for audit in audits]
    return "\n\n".join([_LEGEND, *blocks, "\n".join(_of_data(datamodule))])


def _of_phase(audit: PhaseAudit) -> list[str]:
    phase, kind = audit.phase, type(audit.phase.algorithm).__name__
    name = phase.name if phase.name == kind else f"{phase.name} ({kind})"
    lines = [f"{name}: {_rounds(audit)}"]
    if audit.before:
        lines += _row(
            "before the first round", "the server uses " + "; ".join(audit.before) + " (not counted as traffic)"
        )
    for direction, title in _TITLES.items():
        for index, sent in enumerate(_of_rounds(audit, direction)):
            lines += _row(title if not index else "  in later rounds", _contents(audit, sent))
        if direction == "up":
            lines += _of_updates(audit)
    if not audit.transfers:
        lines += _row("leaves a client", "nothing")
    lines += _row("stays with its client", ", ".join(patterns(audit.stays, audit.names)) or "nothing")
    if phase.monitor:
        samples = "validation" if phase.monitor.startswith("validation") else "test"
        lines += _row("selection of the round", f"{phase.monitor}, a number of each participant, on {samples} samples")
    return lines


def _of_updates(audit: PhaseAudit) -> list[str]:
    """What the clients' updates may have beside what the dry run had, and what the server makes of them."""
    lines = []
    if audit.may_leave and audit.transfers:
        lines += _row("  also shared", ", ".join(patterns(audit.may_leave, audit.names)))
    if audit.weight:
        lines += _row("  with the weight", audit.weight)
        aggregation = audit.phase.aggregation
        way = "in its own way" if aggregation is None else f"with {type(aggregation).__name__}, one by one"
        needs = "needs only their weighted mean" if audit.only_mean else f"combines them {way}"
        lines += _row("of the updates, the server", needs)
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
    kinds = [{(without_numbers(own_name(each)), each.shape) for each in sent} for sent in (first, rest)]
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
        shapes.setdefault(without_numbers(own_name(each)), {})[f"{shape} {each.dtype}".lstrip()] = None
    found = patterns({own_name(each): None for each in sent}, audit.names)
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


def patterns(chosen: Iterable[str], names: Sequence[str]) -> list[str]:
    """The chosen names, in which a star stands for all names with a beginning, or for numbers.

    Args:
        chosen: names of tensors of the module, and of an algorithm's, such as ``control/<name of the module's>``.
        names: names of all of the module's tensors.

    Example:
        >>> names = ["expert.body.w", "expert.body.b", "expert.head.w", "gate.w"]
        >>> patterns(["expert.body.w", "expert.body.b", "gate.w", "own/expert.head.w", "sums/3"], names)
        ['expert.body.*', 'gate.*', 'own/expert.head.*', 'sums/*']
    """
    by_prefix: dict[str, set[str]] = {"": set()}
    others: dict[str, None] = {}
    known, tops = {*names}, dict.fromkeys(name.partition(".")[0] for name in names)
    for name in chosen:
        start = next((end for end in _starts(name) if name[end:] in known), None)
        if start is not None:
            by_prefix.setdefault(name[:start], set()).add(name[start:])
        else:
            others[without_numbers(name)] = None
    found = [
        prefix + pattern
        for prefix, inside in by_prefix.items()
        for top in tops
        for pattern in _cover(top, inside, names)
    ]
    return [*found, *others]


def _starts(name: str) -> list[int]:
    """Where the name of one of the module's tensors may begin: at 0 or after a slash."""
    return [0, *(index + 1 for index, character in enumerate(name) if character == "/")]


def _cover(start: str, chosen: set[str], names: Sequence[str]) -> list[str]:
    """Patterns of the chosen names that are ``start`` or go on after it with a dot."""
    if start in names:
        return [start] if start in chosen else []
    inside = [name for name in names if name.startswith(f"{start}.")]
    if all(name in chosen for name in inside):
        return [f"{start}.*"]
    if not any(name in chosen for name in inside):
        return []
    nexts = dict.fromkeys(name.removeprefix(f"{start}.").partition(".")[0] for name in inside)
    return [pattern for each in nexts for pattern in _cover(f"{start}.{each}", chosen, names)]


def _of_data(datamodule: FederatedDataModule) -> list[str]:
    """What all phases learn of the clients' data before any round."""
    lines = ["All phases: shared without being sent"]
    samples = "all training samples" if datamodule.learn_from is None else "all training samples that opt in"
    if datamodule.has_learned:
        what = "the vocabulary" if datamodule.normalization is None else "mean and standard deviation of each channel"
        lines += _row(what, f"computed from {samples}")
    lines += _row("number of classes", "the largest label of all samples")
    return lines


def _row(title: str, text: str) -> list[str]:
    """Lines of a title and a text, which is wrapped."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > _CHARACTERS - _WIDTH - 2:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".lstrip()
    lines.append(line)
    return [f"  {(title if not index else ''):<{_WIDTH}}{line}" for index, line in enumerate(lines)]
