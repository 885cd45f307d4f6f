"""A phase whose local experts start as copies: of what each client has, also where it keeps a part to itself."""

import warnings
from functools import partial

import pytest
import torch
from helpers import assert_same_bits, tensors
from helpers.runs import data, federation, model

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import APFL, Ditto, FedAvg, FedRoD, FineTuning, Local, PFedMe, PFLMoE
from fedmoe_pl.models import GlobalOnly, LinearGate, LocalOnly
from fedmoe_pl.trees import copies_of_parts

PARTIAL = ("global_expert.extractor.*", "global_expert.classifier.*", "*.bias")
COPYING = {
    "FineTuning": lambda: Phase("it", FineTuning(), gate=LocalOnly()),
    "PFLMoE": lambda: Phase("it", PFLMoE(interleaved=True), gate=LinearGate(5), rounds=2),
    "Ditto": lambda: Phase("it", Ditto(), gate=LocalOnly(), rounds=2, clients_per_round=2),
    "APFL": lambda: Phase("it", APFL(alpha=1.0), gate=LocalOnly(), rounds=2, clients_per_round=2),  # v alone
    "FedRoD": lambda: Phase("it", FedRoD(), gate=LocalOnly(), rounds=2, clients_per_round=2),  # shares the extractor
}
CASES = [(name, shared) for name in COPYING for shared in ("*", PARTIAL[0])]
CASES += [("FineTuning", shared) for shared in ("global_expert.*", *PARTIAL[1:])]
CASES += [("Ditto", None), ("APFL", None)]  # after Local; the others start from a federated phase
# Ditto and APFL also share what clients keep to themselves before, and the warning says so
pytestmark = pytest.mark.filterwarnings("ignore:.* have each trained for themselves")


def before(shared) -> Phase:
    algorithm, cohort = (Local("global_expert.*"), None) if shared is None else (FedAvg(shared), 2)
    return Phase("before", algorithm, rounds=2, clients_per_round=cohort, gate=GlobalOnly())


def fitted(path, shared, phase, **kwargs):
    phase.train.max_epochs, phase.start = 0, "before"
    run = federation(path, [before(shared), phase], **kwargs)
    run.fit(model(), data())
    return run


def global_expert_of(run, client) -> dict:
    """A client's global expert after the first phase, under the names of the local one."""
    return copies_of_parts(dict(run.client_module("before", client).state_dict()), {"local_expert": "global_expert"})


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "shared"), CASES)
def test_without_epochs_a_local_expert_is_what_its_client_had(name, shared, tmp_path):
    run = fitted(tmp_path, shared, COPYING[name]())
    differ = {str([*global_expert_of(run, client).values()]) for client in range(3)}
    assert (len(differ) > 1) == (shared not in ("*", "global_expert.*"))
    for client in range(3):
        now = tensors(run.client_module("it", client), "local_expert.")
        assert_same_bits(now, global_expert_of(run, client))


def copies_of_server(run) -> dict:
    """The global expert of the second phase's server, under the names of the local one."""
    w = {name: tensor for name, tensor in run.run.states["it"].server.items() if name.startswith("global_expert.")}
    return copies_of_parts(w, {"local_expert": "global_expert"})


def test_a_client_that_never_trained_with_pfedme_has_the_server_s_model(tmp_path):
    phases = [before(PARTIAL[0]), Phase("it", PFedMe(), gate=LocalOnly(), clients_per_round=1, start="before")]
    plain = model()
    plain.optimizer = partial(torch.optim.SGD, lr=0.1)
    run = federation(tmp_path, phases)
    run.fit(plain, data())
    kept = [run.run.states["it"].clients.get(client, {}) for client in range(3)]
    absent = next(client for client in range(3) if "local_expert.classifier.1.bias" not in kept[client])
    assert_same_bits(tensors(run.client_module("it", absent), "local_expert."), copies_of_server(run))


@pytest.mark.parametrize("algorithm", [Ditto, APFL])
@pytest.mark.few(1)
def test_newcomers_start_from_copies_of_what_the_federation_had_last(algorithm, tmp_path):
    phases = [before(PARTIAL[0]), Phase("it", algorithm(), gate=LocalOnly(), rounds=2, start="before")]
    run = federation(tmp_path, phases, trainer={"accelerator": "cpu", "max_epochs": 1})
    run.fit(model(), data())
    expected, checkpoint = copies_of_server(run), str(run.run_dir / "checkpoints/last.ckpt")
    phases[1].train.max_epochs = 0
    newcomers = federation(tmp_path, phases)
    newcomers.personalize(model(), data(), checkpoint, rounds=1)
    for client in range(3):
        torch.testing.assert_close(tensors(newcomers.client_module("it", client), "local_expert."), expected)


def test_sharing_what_clients_have_trained_for_themselves_warns(tmp_path):
    sentence = "Phase 'it': FedAvg shares 'global_expert.classifier.1.weight', which the clients of 'before' have each"
    with pytest.warns(UserWarning, match=sentence):
        fitted(tmp_path, PARTIAL[0], Phase("it", FedAvg("global_expert.*"), gate=GlobalOnly()))
    shares_again = [before(PARTIAL[0]), Phase("it", FedAvg("global_expert.extractor.*"), start="before")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        federation(tmp_path, shares_again).fit(model(), data())
