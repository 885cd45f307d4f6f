"""What a client reports of evaluations: what its own configuration says, and by default nothing of its class shares."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from helpers.deployed import Deployment, federation, method_of, participant, reason_of
from helpers.methods import data
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import DPSGD, Reports, Select
from fedmoe_pl.aggregation import DifferentialPrivacy
from fedmoe_pl.checkpoints.files import read_json
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.deployment import Message
from fedmoe_pl.deployment.messages import FAILED
from fedmoe_pl.deployment.reports import Reported, is_private
from fedmoe_pl.evaluation.results import ACCURACIES, ClientEvaluation
from fedmoe_pl.report.report import report

SPLIT = {"validation_fraction": 0.2, "test_fraction": 0.2}
CLASSES, BIAS = 3, "global_expert.classifier.1.bias"


def method(name="FedAvg of everything", **of_phase):
    return method_of(name, **{"evaluate": True, "clients_per_round": 1.0, **of_phase})


def begun(of_method, tmp_path, **settings):
    """A client in the first phase of a run, and the messages that led it there."""
    client = participant(of_method, tmp_path, 0, data(**SPLIT), **settings)
    about = {"run": 32 * "0", "num_clients": 5, "num_classes": CLASSES}
    prepare = Message("prepare", {**about, "description": client.answer(Message("describe")).values})
    begin = Message("begin", {"run": 32 * "0", "phase": of_method.phases()[0].name, "rounds_before": 0})
    assert [client.answer(message).kind for message in (prepare, begin)] == ["prepared", "begun"]
    return client, [prepare, begin]


def predicting(client, label):
    """The tensors of a model that predicts one class, whatever it is given."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in client._plan.training.initial.items()}
    tensors[BIAS][label] = 1e6
    return tensors


def asked(client, messages, tensors, round=1, **others):
    return client.answer(asking(messages, tensors, round, **others))


def asking(messages, tensors, round=1, **others):
    values = {key: messages[-1].values[key] for key in ("run", "phase")} | {"round": round, "kept": []}
    return Message("evaluate", {**values, "evaluation_point": "aggregation", **others}, tensors)


@pytest.mark.parametrize("name", [None, "reweighted_test"])
def test_models_of_the_server_s_making_give_no_class_counts_unless_the_client_s_configuration_says_so(name, tmp_path):
    """One that always predicts a class has its share of the client's samples as reweighted accuracy."""
    reports = Reports() if name is None else Reports([name])
    client, messages = begun(method(rounds=CLASSES), tmp_path, reports=reports)
    answers = [asked(client, messages, predicting(client, label), label + 1) for label in range(CLASSES)]
    found = [answer.values["reweighted_test"] for answer in answers]
    assert all(answer.kind == "evaluation" for answer in answers)
    if name is None:
        assert all(map(math.isnan, found))
        return
    own = client.datamodule
    labels = own.y[torch.cat([own.train_samples[0], own.validation_samples[0]])]
    assert [share * len(labels) for share in found] == pytest.approx(labels.bincount(minlength=CLASSES).tolist())


@pytest.mark.parametrize("reports", [Reports(), Reports(["reweighted_test"])])
def test_no_value_depends_on_the_labels_of_training_samples(reports, tmp_path):
    """The same model is evaluated by two clients whose samples differ in these alone."""
    said = []
    for i in range(2):
        client, messages = begun(method(), tmp_path / str(i), reports=reports)
        own = client._plan.training.datamodule
        samples = own.train_samples[0]
        own.y[samples] = (own.y[samples] + i) % CLASSES
        counts = own.class_counts()
        own.class_shares = counts / counts.sum(1, keepdim=True)
        said.append(str(asked(client, messages, dict(client._plan.training.initial)).values))
    assert (said[0] == said[1]) == (reports.metrics is None)


PRIVATE = {
    "secure_aggregation": {"secure_aggregation": True},
    "sample_privacy": {"sample_privacy": DPSGD(0.5, 1e-3, noise_multiplier=1.0)},
    "DifferentialPrivacy": {"aggregation": DifferentialPrivacy(1.0, 1.0, 0.1)},
}


@pytest.mark.parametrize("name", PRIVATE)
def test_nothing_is_reported_in_any_phase_of_a_federation_with_privacy_unless_it_is_named(name):
    (plain,) = method("FedAvg of everything").phases()
    (private,) = method("SecureAggregation", **{"secure_aggregation": False, **PRIVATE[name]}).phases()
    assert is_private(private) and not is_private(plain)
    assert Reports().names([plain, private], {}) == [] and "local_test" in Reports().names([plain], {})
    assert Reports(["local_test"]).names([private], {}) == ["local_test"]
    assert Reports().withheld([plain], {}) == {"reweighted_test"}


@pytest.mark.parametrize("reports", [Reports(), Reports(["global_test"])])
@pytest.mark.few(1)
def test_a_deployed_federation_with_privacy_has_the_values_that_are_named(reports, tmp_path, caplog):
    deployed = Deployment(method("SecureAggregation"), tmp_path, reports=reports)
    (evaluation,) = deployed.run(logger=True).results.values()
    assert len(evaluation.values("global_test")) == (5 if reports.metrics else 0)
    assert not evaluation.values("local_test") and not evaluation.values("reweighted_test")
    of_clients = [answer for answer in deployed.answers if answer.kind == "evaluation"]
    assert of_clients and not any(answer.tensors for answer in of_clients)
    with nullcontext() if reports.metrics else pytest.raises(InvalidArgumentError, match="a run with accuracies"):
        report([str(deployed.server.run_dir), "--output", str(tmp_path / "report.html")])


@pytest.mark.parametrize(
    ("monitor", "allowed"), [("reweighted_test", "one of global_test"), ("global_test", "left out")]
)
def test_a_phase_is_not_selected_by_what_no_client_reports(monitor, allowed, tmp_path):
    name = "SecureAggregation" if monitor == "global_test" else "FedAvg of everything"
    deployed = Deployment(method(name, select=Select(monitor)), tmp_path)
    refused = f"select.monitor is '{monitor}', but must be {allowed}.*reports.metrics"
    with pytest.raises(InvalidArgumentError, match=refused):
        deployed.run(evaluate_every_n_rounds=1)
    assert not [message for _, message in deployed.heard if message.kind.startswith("train")]


def test_a_client_evaluates_one_model_in_a_round_whoever_asks(tmp_path):
    """Also in another run, and when it was started again; the same model, as after a kill, has the same answer."""
    client, messages = begun(method(rounds=2), tmp_path, evaluate_every_n_rounds=1)
    first, second = predicting(client, 0), predicting(client, 1)
    answer = asked(client, messages, first)
    other_run = [replace(each, values={**each.values, "run": 32 * "a"}) for each in messages]

    def assert_refuses(participant, of_run):
        reason = reason_of(participant, asking(of_run, second))
        assert "has evaluated another model after round 1 of phase 'it'" in reason
        assert asked(participant, of_run, first).to_bytes() == answer.to_bytes()

    assert_refuses(client, messages)
    assert [client.answer(message).kind for message in other_run] == ["prepared", "begun"]
    assert_refuses(client, other_run)
    again = participant(method(rounds=2), tmp_path, 0, data(**SPLIT), evaluate_every_n_rounds=1)
    assert [again.answer(message).kind for message in messages] == ["prepared", "begun"]
    assert_refuses(again, messages)
    assert asked(client, other_run, second, round=2).kind == "evaluation"


def test_what_a_phase_starts_from_makes_no_other_model_of_the_same_round(tmp_path):
    client, messages = begun(method(rounds=2), tmp_path, evaluate_every_n_rounds=1)
    answer, begin = asked(client, messages, {}), messages[-1]
    assert client.answer(replace(begin, tensors=predicting(client, 1))).kind == "begun"
    assert "has evaluated another model after round 1" in reason_of(client, asking(messages, {}))
    assert client.answer(begin).kind == "begun" and asked(client, messages, {}).to_bytes() == answer.to_bytes()


def test_a_client_evaluates_after_rounds_of_its_own_configuration_and_a_last_one(tmp_path):
    client, messages = begun(method(rounds=9), tmp_path, evaluate_every_n_rounds=4)
    tensors = dict(client._plan.training.initial)
    kinds = {round: asked(client, messages, tensors, round).kind for round in (4, 8, 9, 6, 5, 7, 0, 6)}
    assert kinds == dict.fromkeys((4, 8, 9, 6), "evaluation") | dict.fromkeys((5, 7, 0), FAILED)
    other_run = [replace(each, values={**each.values, "run": 32 * "a"}) for each in messages]
    assert [client.answer(message).kind for message in other_run] == ["prepared", "begun"]
    kinds = {round: asked(client, other_run, tensors, round).kind for round in (5, 4, 6)}
    assert kinds == {5: FAILED, 4: "evaluation", 6: "evaluation"}


@pytest.mark.slow
def test_a_client_keeps_a_record_of_what_it_has_reported(tmp_path):
    of_method = method("PFLMoE", rounds=1)
    deployed = Deployment(of_method, tmp_path, datamodule=data(**SPLIT), evaluate_every_n_rounds=1)
    deployed.run()
    said = zip(deployed.heard, deployed.answers, strict=True)
    answers = [(message, answer) for (client, message), answer in said if client == 2 and answer.kind == "evaluation"]
    (path,) = tmp_path.glob("client 2/*/evaluations.json")
    rows = read_json(path)["evaluations"]
    assert len(rows) == len(answers) > 3
    for row, (message, answer) in zip(rows, answers, strict=True):
        about = {name: message.values[name] for name in ("phase", "round", "evaluation_point")}
        assert about.items() <= row.items()
        weights = {"gate_weights": answer.tensors["gate_weights"].flatten().tolist()} if answer.tensors else {}
        numbers = {name: answer.values[name] for name in (*ACCURACIES, "validation_loss")}
        assert row["reported"] == {name: value for name, value in numbers.items() if not math.isnan(value)} | weights


def test_what_could_not_be_recorded_is_recorded_before_it_is_reported(tmp_path, monkeypatch):
    said, reported = ClientEvaluation(0, 9, math.nan, math.nan, 0.5, math.nan), Reported()
    arguments = "it", 1, "aggregation", "a digest", True, said
    reported.begin(tmp_path)

    def full(*_):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        with pytest.raises(MisconfigurationException, match="No space left"):
            reported.add(*arguments)
    reported.add(*arguments)
    (row,) = read_json(tmp_path / "evaluations.json")["evaluations"]
    assert row["model"] == "a digest" and row["reported"] == {"global_test": 0.5}


def test_what_is_reported_has_enough_samples_and_no_more_digits():
    weights = torch.tensor([[0.25, 0.75], [0.125, 0.875], [0.125, 0.875]])
    metrics = {"local_test_f1": 1 / 7, "global_test_f1": 2 / 7}
    evaluation = ClientEvaluation(
        0, 10, 2 / 3, 1 / 3, 0.98765, 1 / 9, weights, torch.zeros(3), 1234.5678, metrics=metrics, name="Berlin"
    )
    samples = {"local_test": 3, "reweighted_test": 100, "global_test": 100, "validation": 9}
    names = ["local_test", "local_test_f1", "global_test", "global_test_f1", "validation", "validation_loss"]
    names += ["gate_weights"]
    said = Reports(names, digits=2).reported(evaluation, names, samples)
    assert (said.local_test, said.global_test, said.validation) == (0.67, 0.99, 0.11)
    assert (said.validation_loss, said.name) == (1200, "")
    assert said.metrics == {"local_test_f1": 0.14, "global_test_f1": 0.29}
    assert said.gate_weights is not None and said.gate_weights.tolist() == [[0.17, 0.83]] and said.gate_labels is None
    assert math.isnan(said.reweighted_test)
    few = Reports(names, min_samples=4).reported(evaluation, names, samples)
    assert math.isnan(few.local_test) and math.isnan(few.metrics["local_test_f1"]) and few.gate_weights is None
    assert (few.global_test, few.validation, few.validation_loss) == (0.98765, 1 / 9, 1234.5678)
    nothing = Reports([], min_samples=1).reported(evaluation, [], samples)
    assert not nothing.has_values and nothing.gate_weights is None


def test_a_client_may_report_less_than_the_server_s_configuration_says(tmp_path):
    deployed = Deployment(method(), tmp_path)
    deployed.participants[1] = deployed.started(1, reports=Reports(["global_test"], digits=1))
    (evaluation,) = deployed.run().results.values()
    values = [client.global_test for client in evaluation.clients]
    assert values[1] == float(f"{values[1]:.0e}") and not any(map(math.isnan, values))


def test_names_and_numbers_that_mean_nothing_are_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match="metrics is 'accuracy', but must be one of local_test"):
        participant(method(), tmp_path, 0, reports=Reports(["accuracy"]))
    for wrong in ({"min_samples": 0}, {"digits": 0}):
        with pytest.raises(MisconfigurationException, match=next(iter(wrong))):
            Reports(**wrong)


def rows_of(text):
    """The rows of an audit's last block, by title."""
    rows = {}
    for line in text.rpartition("Messages of a deployment")[2].splitlines()[2:]:
        title = line[:30].strip().removeprefix("or to any: ")
        rows[title or [*rows][-1]] = f"{'' if title else rows[[*rows][-1]]} {line[30:].strip()}"
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SecureAggregation", "PFLMoE", "FedMoEDA", "FedMix"])
def test_the_audit_names_all_that_is_on_the_wire_also_of_evaluations(name, tmp_path, capsys):
    of_method = method(name)
    reports = Reports(["local_test", "validation_loss", "gate_weights"]) if name == "SecureAggregation" else Reports()
    settings = {"reports": reports, "evaluate_every_n_rounds": 1}
    deployed = Deployment(of_method, tmp_path, datamodule=data(**SPLIT), **settings)
    deployed.run()
    capsys.readouterr()
    audits = federation(of_method.phases(), tmp_path, **settings).audit(of_method.model(), data(**SPLIT))
    rows = rows_of(capsys.readouterr().out)
    reported = {phase: set() for phase in audits}
    for (_, message), answer in zip(deployed.heard, deployed.answers, strict=True):
        for each in (message, answer):
            hidden = {"run", "phase", "round", "kept", "gate_weights", "gate_labels", "name"}
            listed = {text.strip() for text in rows[each.kind].split(",")}
            assert {*each.values} - hidden <= listed, each.kind
            assert not each.tensors or len(listed - {*each.values}) > 0, each.kind
        if answer.kind == "evaluation":
            values = {**answer.values, **answer.values["metrics"], "gate_weights": 0.0 if answer.tensors else math.nan}
            names = [name for name in (*ACCURACIES, "validation_loss", "gate_weights") if not math.isnan(values[name])]
            reported[message.values["phase"]] |= {*names}
    assert {phase: {*audit.reported} for phase, audit in audits.items()} == reported


def test_the_audit_says_what_is_reported_and_what_bounds_it(tmp_path, capsys):
    texts = []
    for reports, of_phase in ((Reports(digits=2, min_samples=20), {"rounds": 6}), (Reports(), {"evaluate": False})):
        of_method = method(**of_phase)
        settings = federation(of_method.phases(), tmp_path, reports=reports, evaluate_every_n_rounds=4)
        settings.audit(of_method.model(), data(**SPLIT))
        texts.append(" ".join(capsys.readouterr().out.split()))
    names = "local_test, global_test, validation, validation_loss"
    said = f"{names}; of one model after 2 of 6 rounds; 2 digits; on at least 20 samples"
    assert f"reports, if deployed {said} stays with" in texts[0] and "reports, if deployed nothing stays" in texts[1]
