"""What a phase starts from."""

import pytest

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import ClusterMixture, FedAvg, FineTunedCluster, FineTuning, Local, PFLMoE, SpecialistMixture
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
    phases = [
        FEDERATED,
        ALL,
        QUARTER,
        Phase("frozen", Local("gate.*"), start="quarter"),
        Phase("gate", PFLMoE(), start="frozen"),
        Phase("again", PFLMoE(), start="gate"),
        Phase("specialists", SpecialistMixture(), start="all"),
        Phase("own", PFLMoE(), start="initial"),
        Phase("interleaved", PFLMoE(interleaved=True), start="F"),
        Phase("default", PFLMoE()),
        Phase("longer", PFLMoE(), start="interleaved"),
    ]
    starts = find_starts(phases)
    assert starts == {
        "F": "initial",
        "all": "F",
        "quarter": "F",
        "frozen": "quarter",
        "gate": "frozen",
        "again": "gate",
        "specialists": "all",
        "own": "initial",
        "interleaved": "F",
        "default": "quarter",
        "longer": "interleaved",
    }
    names = [phase.name for phase in chain_of_starts(phases, starts, "again")]
    assert names == ["again", "gate", "frozen", "quarter", "F"]
    assert [phase.name for phase in chain_of_starts(phases, starts, "own")] == ["own"]
    assert chain_of_starts(phases, starts, "initial") == []
