"""What a phase starts from."""

import pytest

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import (
    ClusterMixture,
    FedAvg,
    FineTunedCluster,
    FineTuning,
    KNNPer,
    LabelPrior,
    Local,
    PFLMoE,
    SpecialistMixture,
)
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import LinearGate
from fedmoe_pl.phases.starts import chain_of_starts, find_starts

FEDERATED = Phase("F", FedAvg("global_expert.*"))
QUARTER = Phase("quarter", FineTuning(gate_fraction=0.25))
ALL = Phase("all", FineTuning())
WITHOUT_SAMPLES = "a phase of FineTuning with gate_fraction"
LACKING = [
    (f"{WITHOUT_SAMPLES} 0.25", [Phase("G", PFLMoE(), gate=LinearGate(6), start="F")]),
    (f"{WITHOUT_SAMPLES} 0", [Phase("G", SpecialistMixture(), start="F")]),
    (f"{WITHOUT_SAMPLES} 0.25", [ALL, Phase("G", PFLMoE(gate_fraction=0.25), start="all")]),
    (f"{WITHOUT_SAMPLES} 0", [QUARTER, Phase("G", SpecialistMixture(), start="quarter")]),
    (  # the last expert has seen the samples that the first left out
        f"{WITHOUT_SAMPLES} 0.25",
        [QUARTER, Phase("again", FineTuning(), start="quarter"), Phase("G", PFLMoE(), start="again")],
    ),
    (  # trains an expert on another split
        f"{WITHOUT_SAMPLES} 0.25",
        [QUARTER, Phase("o", PFLMoE(0.5, interleaved=True), start="quarter"), Phase("G", PFLMoE(), start="o")],
    ),
    (  # trains a part of the expert on all samples
        f"{WITHOUT_SAMPLES} 0.25",
        [QUARTER, Phase("o", Local("local_expert.classifier.*"), start="quarter"), Phase("G", PFLMoE(), start="o")],
    ),
    (f"{WITHOUT_SAMPLES} 0.1", [Phase("o", Local("local_expert.*"), start="F"), Phase("G", PFLMoE(0.1), start="o")]),
    *(
        ("a federated phase", [Phase("alone", Local()), Phase("G", algorithm, start="alone")])
        for algorithm in (FineTuning(), PFLMoE(interleaved=True), FineTunedCluster(), ClusterMixture())
    ),
]


@pytest.mark.parametrize(("needed", "phases"), LACKING)
def test_a_mixture_with_a_local_expert_that_is_untrained_or_has_seen_the_gate_s_samples_is_refused(needed, phases):
    with pytest.raises(InvalidArgumentError) as error:
        find_starts([FEDERATED, *phases])
    assert (error.value.owner, error.value.argument) == ("Phase 'G'", "start")
    assert error.value.allowed == f"{needed}, or a phase that goes back to one"


def test_a_mixture_may_go_back_to_its_personalized_expert_or_start_from_the_user_s_own_model():
    """Without a start, a phase has the last one with what it needs."""
    given = [  # a phase, and what it starts from
        (FEDERATED, "initial"),
        (Phase("prior", LabelPrior()), "F"),
        (Phase("kNN", KNNPer()), "F"),
        (ALL, "F"),
        (QUARTER, "F"),
        (Phase("frozen", Local("gate.*"), start="quarter"), "quarter"),
        (Phase("gate", PFLMoE(), start="frozen"), "frozen"),
        (Phase("again", PFLMoE(), start="gate"), "gate"),
        (Phase("specialists", SpecialistMixture()), "all"),
        (Phase("on all", PFLMoE(0)), "all"),
        (Phase("own", PFLMoE(), start="initial"), "initial"),
        (Phase("interleaved", PFLMoE(interleaved=True)), "F"),
        (Phase("default", PFLMoE()), "quarter"),
        (Phase("longer", PFLMoE(), start="interleaved"), "interleaved"),
        (Phase("more", FedAvg()), "initial"),
        (Phase("alone", Local()), "initial"),
    ]
    phases = [phase for phase, _ in given]
    starts = find_starts(phases)
    assert starts == {phase.name: start for phase, start in given}
    names = [phase.name for phase in chain_of_starts(phases, starts, "again")]
    assert names == ["again", "gate", "frozen", "quarter", "F"]
    assert [phase.name for phase in chain_of_starts(phases, starts, "own")] == ["own"]
    assert chain_of_starts(phases, starts, "initial") == []
