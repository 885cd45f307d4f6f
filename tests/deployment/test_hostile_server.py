"""A client gives away what its own settings say, and removes what its own files say, whatever a server asks for."""

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

import pytest
import torch
from helpers import mixture, sparse_mixture
from helpers.deployed import Deployment, method_of, reason_of, simulated
from helpers.methods import METHODS, Method, alone, everything, linear_gate, one, phase

from fedmoe_pl import Select, Train
from fedmoe_pl.algorithms import FedAvg, FedMoEDA, FedPAC, Local, OptInFedAvg
from fedmoe_pl.algorithms.algorithm import Messages
from fedmoe_pl.checkpoints.checkpoint import load_federation
from fedmoe_pl.deployment import Message
from fedmoe_pl.models import GlobalOnly

CLIENT = 1
OWN = ["local_expert.*", "gate.*"]


def experts(**kwargs):
    return one(lambda: FedMoEDA(interval=1, **kwargs), None, **everything(rounds=3))


def after_local(algorithm, trainable="*", **kwargs):
    """A phase in which clients train alone what no other needs, and another phase."""
    local = alone("Local", Local(trainable), gate=linear_gate())
    return lambda: [local, phase("it", algorithm(), gate=GlobalOnly(), **everything(**kwargs))]


EXCHANGING = {
    "no exchange": Method(experts(top_p=0), sparse_mixture, ["experts.*", "gate.*"]),
    "similarity of updates": Method(experts(top_p=2, similarity="updates"), sparse_mixture, ["gate.*"]),
    "FedPAC": Method(after_local(FedPAC, OWN, start="Local"), mixture, OWN),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", EXCHANGING)
def test_an_honest_exchange_sends_nothing_private(name, tmp_path):
    method = EXCHANGING[name]
    deployed = Deployment(method, tmp_path)
    deployed.run()
    left = {tensor for answer in deployed.answers for tensor in answer.tensors}
    assert left and not [tensor for tensor in left for pattern in method.private if fnmatchcase(tensor, pattern)]


def deployed_client(method, tmp_path):
    """The client of a finished run, the run's states, and what a message of the last phase says."""
    deployed = Deployment(method, tmp_path)
    server = deployed.run()
    last = deployed.heard[-1][1].values
    values = {key: last[key] for key in ("run", "phase")} | {"round": 1}
    return deployed.participants[CLIENT], server, values


def killed_in_round(round, method, tmp_path, **settings):
    """A deployment whose server is killed when the second client has trained in a round."""
    trained = []

    def is_time(client, message):
        if message.kind == "train" and message.values["round"] == round:
            trained.append(client)
        return len(trained) == 2

    deployed = Deployment(method, tmp_path, **settings)
    deployed.run_until(is_time)
    return deployed


def answer_again(deployed, **values):
    """The client's answer to its last message to train, with other values."""
    *_, last = (message for client, message in deployed.heard if client == CLIENT and message.kind == "train")
    return deployed.participants[CLIENT].answer(Message("train", {**last.values, **values}, last.tensors))


def files_of(tmp_path):
    """The content of all files that the client keeps of a run, by path."""
    return {path: path.read_bytes() for path in tmp_path.glob(f"client {CLIENT}/*/checkpoints/clients/*/*.safetensors")}


def newest(tmp_path, phase):
    """The number of the newest file that the client has of a phase."""
    return max(int(path.name.partition("_")[0]) for path in files_of(tmp_path) if path.parent.name == phase)


@pytest.mark.few("FedPer")
@pytest.mark.parametrize("name", ["FedAvg of everything", "FedPer", "Ditto", "Scaffold", "PFLMoE", "FedMoEDA"])
def test_no_read_gets_what_stays_with_the_client(name, tmp_path):
    method = METHODS[name]
    client, server, values = deployed_client(method, tmp_path)
    everything = [*dict.fromkeys(tensor.partition(".")[0] for tensor in method.model().state_dict())]
    files = [[of_phase, number] for of_phase in server.run.states for number in range(1, 7)]
    for of_phase, number in files:
        for parts in (everything, ["gate"], ["experts.0", "gate"]):
            asked = {**values, "kept": [[of_phase, number, None]], "parts": parts, "needed": files}
            assert reason_of(client, Message("read", asked))


def test_an_exchange_gives_what_is_declared_as_clients_have_trained_it_last(tmp_path):
    client, _, values = deployed_client(METHODS["FedMoEDA"], tmp_path)
    number = newest(tmp_path, "it")

    def read(number, part):
        return Message("read", {**values, "kept": [["it", number, None]], "parts": [part], "round": 1})

    given = client.answer(read(number, "experts.1")).tensors
    assert given and all(name.startswith("experts.1.") for name in given)
    assert "must leave it with its client, because `messages.exchanged`" in reason_of(client, read(number, "gate"))
    assert "after their last training, and nothing older" in reason_of(client, read(number - 1, "experts.1"))


def test_private_tensors_do_not_leave_under_other_names_or_in_other_phases(tmp_path):
    """Clients train everything alone, and then FedAvg from the initial model, which shares the global expert."""
    method = Method(after_local(lambda: FedAvg("global_expert.*")))
    client, _, values = deployed_client(method, tmp_path)
    number = newest(tmp_path, "Local")
    renamed = {name: name.replace("global", "local") for name in mixture().state_dict() if name.startswith("global")}
    for names in (None, renamed, {name: name for name in renamed}):
        for kind in ("train", "request", "evaluate", "finish"):
            asked = {**values, "kept": [["Local", number, names]], "needed": [["Local", number]], "keep": ["it", 1]}
            asked |= {"whole": False, "evaluation_point": "aggregation", "evaluations": [], "state": {}}
            reason = f"it refuses the message '{kind}': phase 'it' does not go on from such tensors of phase 'Local'"
            assert reason_of(client, Message(kind, asked)) == reason


def test_no_message_says_what_a_client_removes(tmp_path):
    """One client gets them all; those that prepare it anew come last."""
    client, _, values = deployed_client(METHODS["FineTunedFedPer"], tmp_path)
    before = files_of(tmp_path)
    assert len(before) > 1
    for kind in ("finish", "read", "evaluate", "train", "begin", "prepare", "describe"):
        for of_phase in ("FedPer", "tuned"):
            client.answer(Message(kind, {**values, "phase": of_phase, "kept": [], "needed": [], "keep": [of_phase, 9]}))
        assert before.items() <= files_of(tmp_path).items(), kind


def test_training_that_goes_on_from_nothing_removes_and_overwrites_nothing(tmp_path):
    """The server is killed in the third round of many, so that the phase has rounds that are much later."""
    deployed = killed_in_round(2, method_of("FedPer", rounds=60, **everything()), tmp_path)
    before, number = files_of(tmp_path), newest(tmp_path, "FedPer")
    for time in range(1, 6):
        kept = [["FedPer", number + time - 1, None]] if time > 1 else []  # of the hostile training before
        assert answer_again(deployed, kept=kept, round=10 * time).values["keeps"] == number + time
    assert before.items() <= files_of(tmp_path).items()


def assert_ends_as_simulated(deployed):
    simulation = simulated(deployed.method, deployed.folder)
    deployed.assert_ends_as(simulation)
    ((name, state),) = simulation.run.states.items()
    assert deployed.server.run.states[name].best_round == state.best_round
    return state


@pytest.mark.few("last-FedPer")
@pytest.mark.parametrize("name", ["FedPer", "FedMoEDA"])
@pytest.mark.parametrize("checkpoint", ["last", "previous"])
def test_a_server_finds_what_both_of_its_checkpoints_refer_to(name, checkpoint, tmp_path):
    """It is killed in the last of five rounds, when clients have already removed what they can."""
    deployed = killed_in_round(4, method_of(name, rounds=5), tmp_path)
    (path,) = tmp_path.glob(f"server/**/checkpoints/{checkpoint}.ckpt")
    deployed.run(str(path))
    assert_ends_as_simulated(deployed)


@pytest.mark.slow
def test_the_files_of_the_best_round_stay_until_the_end(tmp_path):
    """From the third round on, nothing is learned, so that no later round is better."""
    falling = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda round: float(round < 2))
    best = {"select": Select("global_test"), "evaluate": True, "train": Train(round_lr_scheduler=falling)}
    deployed = Deployment(method_of("FedPer", rounds=8, **everything(), **best), tmp_path, evaluate_every_n_rounds=1)
    deployed.run()
    state = assert_ends_as_simulated(deployed)
    assert state.best_round < 6 and len(files_of(tmp_path)) <= 5


@pytest.mark.slow
@pytest.mark.parametrize("round", [9, 50])
def test_a_later_round_makes_no_file_old(round, tmp_path):
    """The server is killed after a training for the next round; then a hostile one names the newest file."""
    method = method_of("FedPer", rounds=60, **everything())
    deployed = killed_in_round(8, method, tmp_path, evaluate_every_n_rounds=1)
    before = files_of(tmp_path)
    kept = [["FedPer", newest(tmp_path, "FedPer"), None]]
    assert answer_again(deployed, kept=kept, round=round).kind == "update"
    referred = set()
    for checkpoint in ("last", "previous"):
        (path,) = tmp_path.glob(f"server/**/checkpoints/{checkpoint}.ckpt")
        ((_, number, _),) = load_federation(path)["phases"]["FedPer"].clients.files[CLIENT]
        referred |= {each for each in before if each.name.startswith(f"{number}_")}
    assert len(referred) == 2 and all(each.is_file() for each in referred)


NO_PART = {
    "opts out": (lambda: OptInFedAvg("global_expert.*", opt_out_clients=0.3), {}),
    "is not among the clients": (lambda: FedAvg("global_expert.*"), {"clients": [0, 2, 3]}),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("why", NO_PART)
def test_a_client_that_takes_no_part_by_its_own_configuration_trains_for_nobody(why, tmp_path):
    algorithm, of_phase = NO_PART[why]
    deployed = Deployment(Method(one(algorithm, **everything(**of_phase))), tmp_path)
    deployed.run()
    trained = {client: message for client, message in deployed.heard if message.kind == "train"}
    (absent, *_) = {*range(5)} - {*trained}
    message = next(iter(trained.values()))
    reason = reason_of(deployed.participants[absent], replace(message, values={**message.values, "kept": []}))
    assert reason.endswith("its own configuration says that it takes no part in phase 'it'")


class Asking(FedAvg):
    messages = Messages(request=("local_expert.",))


def test_a_client_that_takes_no_part_asks_for_nothing(tmp_path):
    """The server asks all clients for their requests, when it gives them the result."""
    part = [0, 2, 3]
    phases = after_local(lambda: Asking("global_expert.*"), OWN, start="Local", clients=part)
    deployed = Deployment(Method(phases), tmp_path)
    deployed.run()
    answers = [(client, each) for (client, _), each in zip(deployed.heard, deployed.answers, strict=True)]
    assert {client for client, each in answers if each.kind == "requested"} == {*range(5)}
    assert {client for client, each in answers if each.kind == "requested" and each.tensors} == {*part}


@pytest.mark.parametrize("why", ["has not trained", "takes no part"])
def test_a_client_gives_no_part_that_it_has_not_trained_in_the_phase(why, tmp_path):
    """It has trained its experts in a phase in which nothing is exchanged; the server says that it trains in the next.

    The server is killed before the first training, or before the second one if the client takes no part.
    """
    clients = None if why == "has not trained" else [0, 2, 3]

    def phases():
        exchanging = phase("it", FedMoEDA(interval=1), start="Local", clients=clients, **everything())
        return [alone("Local", Local(["experts.*", "gate.*"])), exchanging]

    deployed = Deployment(Method(phases, sparse_mixture), tmp_path)
    deployed.run_until(lambda client, message: message.kind == "train" and message.values["phase"] == "it" and client)
    client = deployed.participants[CLIENT]
    begin = next(each for _, each in deployed.heard if each.kind == "begin" and each.values["phase"] == "it")
    assert client.answer(begin).kind == "begun"
    ((name, number, names),) = deployed.server.run.states["it"].clients.files[CLIENT]
    values = {**{key: begin.values[key] for key in ("run", "phase")}, "round": 0, "kept": [[name, number, names]]}
    sent = {"means/owners": torch.tensor([[[CLIENT, 0]]]), "means/weights": torch.ones(1, 1)}
    asked = [
        Message("exchange", values, sent),
        Message("read", {**values, "kept": [["it", 1, None]], "parts": ["experts.0"]}),
    ]
    before = files_of(tmp_path)
    reasons = [reason_of(client, message) for message in asked]
    assert before and before == files_of(tmp_path)
    if clients:
        assert all(reason.endswith("says that it takes no part in phase 'it'") for reason in reasons)
        return
    assert reasons[0].endswith("clients exchange only what they have trained in phase 'it'")
    assert reasons[1].endswith("clients exchange what they keep after their last training, and nothing older")


def test_a_message_names_no_file_twice(tmp_path):
    client, _, values = deployed_client(METHODS["FedPer"], tmp_path)
    kept = [["FedPer", newest(tmp_path, "FedPer"), None]] * 1000
    reason = reason_of(client, Message("evaluate", {**values, "kept": kept, "evaluation_point": "aggregation"}))
    assert reason == "it refuses the message 'evaluate': it names two files of phase 'FedPer'"
