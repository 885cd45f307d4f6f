"""What phases train, as far as their declarations tell, and what must not be evaluated or shared without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from fedmoe_pl.backends import changes_loss
from fedmoe_pl.backends.training import epochs_to_try
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import FixedGate, MixtureOfExperts
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.phases.starts import Start, chain_of_starts


class TrainedParts:
    """What every phase trains, and the checks that follow from it.

    Args:
        phases: all phases.
        starts: what each of them starts from.
    """

    def __init__(self, phases: Sequence[Phase], starts: Mapping[str, Start]) -> None:
        self.phases = phases
        self.starts = starts
        self.names: dict[str, set[str]] = {}

    def add(self, phase: Phase, module: LightningModule, max_epochs: int) -> None:
        """Notes the parameters that a phase trains: by a mixture's own loss, those of the experts that are weighed."""
        algorithm, idle = phase.algorithm, []
        renames = "fresh_optimizers" in algorithm.needs
        if not (changes_loss(algorithm) or renames):
            idle = [part for part in _parts(module) if part not in _weighed(module)]
        names = [
            name
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and not name.startswith(tuple(f"{part}." for part in idle))
        ]
        epochs, shows_all = epochs_to_try(algorithm, range(phase.rounds), max(max_epochs, 1))
        pairs = [*epochs]

        def is_trained(name: str) -> bool:
            under_another = renames and algorithm.is_shared(name)
            return under_another or not shows_all or any(algorithm.is_trainable(name, *pair) for pair in pairs)

        self.names[phase.name] = {name for name in names if is_trained(name)}

    def check_gate(self, phase: Phase, module: LightningModule) -> None:
        """Refuses a gate that weighs an expert which neither the phase nor one that it starts from has trained.

        Of an expert whose parameters are all frozen, it warns: the user may have trained it.
        """
        for part in _weighed(module) if phase.evaluate and not phase.algorithm.has_predictor else []:
            parameters = [*module.get_submodule(part).parameters()]
            if not parameters or self._is_trained(phase, part):
                continue
            gate: Any = module.gate
            if any(parameter.requires_grad for parameter in parameters):
                trained = [other for other in _parts(module) if self._is_trained(phase, other)]
                allowed = f"one that weighs trained experts only ({', '.join(trained) or 'there is none'})"
                because = f"no phase trains {part}; if it is pretrained, freeze its parameters"
                raise InvalidArgumentError(str(phase), "gate", gate, allowed, because)
            rank_zero_warn(
                f"{phase}: gate is {type(gate).__name__}, which weighs the module's {part}, but no phase trains it, "
                "because its parameters are frozen; is it pretrained?"
            )

    def _is_trained(self, phase: Phase, part: str) -> bool:
        """Whether a part was trained in the phase, in one that it starts from, or in another run."""
        chain = chain_of_starts(self.phases, self.starts, phase.name, part.split(".")[0])
        names = (name for other in chain for name in self.names[other.name])
        return any(other.ckpt_path for other in chain) or any(name.startswith(f"{part}.") for name in names)

    def warn_of_lost(self, phase: Phase, module: LightningModule) -> None:
        """Warns of a shared parameter that each client has trained for itself before: the server begins anew."""
        for name, _ in module.named_parameters():
            if not phase.algorithm.is_shared(name):
                continue
            for other in chain_of_starts(self.phases, self.starts, phase.name, name.split(".")[0])[1:]:
                if other.algorithm.is_shared(name):
                    break
                if name in self.names[other.name]:
                    rank_zero_warn(
                        f"{phase}: {type(phase.algorithm).__name__} shares '{name}', which the clients of "
                        f"'{other.name}' have each trained for themselves; the server begins with the initial one."
                    )
                    return


def _parts(module: LightningModule) -> Sequence[str]:
    """The parts of a mixture that its gate weighs, in order; none of other modules."""
    return module.weighed_parts if isinstance(module, MixtureOfExperts) else []


def _weighed(module: LightningModule) -> list[str]:
    """Those of them to which the gate gives a weight."""
    parts, gate = _parts(module), getattr(module, "gate", None)
    return [part for index, part in enumerate(parts) if not isinstance(gate, FixedGate) or index in gate.active]
