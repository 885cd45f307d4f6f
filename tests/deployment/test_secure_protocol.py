"""The sum is exact whoever drops out, nobody else can know a summand, and what is altered is noticed."""

import hashlib
import itertools
import re
import secrets
from fractions import Fraction

import pytest
import torch
from helpers.secrets import held

pytest.importorskip("cryptography")
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedmoe_pl.deployment.secure import protocol
from fedmoe_pl.deployment.secure.protocol import (
    CODE,
    ENCRYPTED,
    ClientHalf,
    MaskingError,
    PublicKeys,
    ServerHalf,
    agreed,
    derived,
    joined,
    split,
)

CLIENTS, STEPS = range(5), ("keys", "shares", "masked", "confirmed", "unmasked")
AFTER_MASKING = STEPS[3:]
PRIME = 2**521 - 1


def summand(client):
    """Integers of 64 bits, also the least and the largest, in two tensors."""
    generator = torch.Generator().manual_seed(client)
    edges = torch.tensor([-(2**63), 2**63 - 1, -1, 0, 1])
    random = torch.randint(-(2**62), 2**62, (3, 7), generator=generator)
    return {"b.weight": random, "a": edges.roll(client)}


def encoded(tree):
    return [tensor.numpy().tobytes() for tensor in tree.values() if tensor.numel() > 5]


def without(answers, dropped):
    return {client: answer for client, answer in answers.items() if client not in dropped}


def client_half(client, threshold, context="a round", cohort=5, num_clients=5):
    return ClientHalf(client, threshold, context, cohort, num_clients)


class Round:
    """A round in memory, in which clients drop out before a step, and messages may be changed on their way.

    Attributes:
        sent: all that clients have sent, and all that the server has sent them.
    """

    def __init__(self, threshold=4, dropped=None, change=None):
        self.dropped = {step: set() for step in STEPS} | (dropped or {})
        self.change = change or (lambda step, answers: answers)
        self.clients = {client: client_half(client, threshold) for client in CLIENTS}
        self.server = ServerHalf(threshold, "a round")
        self.sent = []

    def answers(self, step, of_client, clients):
        """What the clients that are left answer; the others are gone for good."""
        left = [client for client in clients if client not in self.dropped[step]]
        answers = self.change(step, {client: of_client(client) for client in left})
        self.sent.append(answers)
        return answers

    def run(self):
        clients, server = self.clients, self.server
        keys = server.keys(self.answers("keys", lambda client: clients[client].keys, CLIENTS))
        self.sent.append(keys)
        shares = server.shares(self.answers("shares", lambda client: clients[client].share(keys), keys))
        self.sent.append(shares)
        masked = self.answers("masked", lambda client: clients[client].mask(shares[client], summand(client)), shares)
        survivors = server.add(masked)
        named = self.answers("confirmed", lambda client: clients[client].confirm(survivors), survivors)
        codes = server.codes(named)
        return server.unmasked(self.answers("unmasked", lambda client: clients[client].unmask(codes[client]), codes))


def integer_sum(clients):
    """The sum modulo 2^64 by Python's integers, as those of 64 bits."""
    total = {}
    for name, tensor in summand(0).items():
        columns = zip(*(summand(client)[name].flatten().tolist() for client in clients), strict=True)
        values = [(sum(column) + 2**63) % 2**64 - 2**63 for column in columns]
        total[name] = torch.tensor(values).reshape(tensor.shape)
    return total


def assert_is_sum(total, clients):
    expected = integer_sum(clients)
    assert all(torch.equal(total[name], expected[name]) for name in expected), clients


@pytest.mark.parametrize("threshold", [3, 4])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.few(4)
def test_the_sum_is_exact_whoever_drops_out(step, threshold):
    """All patterns of five clients: the survivors' sum, or none if fewer than the threshold are left."""
    for number in range(len(CLIENTS) + 1):
        for dropped in itertools.combinations(CLIENTS, number):
            it = Round(threshold, {step: set(dropped)})
            if len(CLIENTS) - number < threshold:
                sentence = f"{len(CLIENTS) - number} clients are left, but secure aggregation needs {threshold}"
                with pytest.raises(MaskingError, match=f"^{sentence}$"):
                    it.run()
                continue
            summed = [client for client in CLIENTS if step in AFTER_MASKING or client not in dropped]
            assert_is_sum(it.run(), summed)


def test_the_sum_is_exact_if_clients_drop_out_in_every_step():
    for order in itertools.permutations(range(5), 2):
        first, second = (STEPS[step] for step in order)
        total = Round(3, {first: {1}, second: {4}}).run()
        gone = {client for step, client in ((first, 1), (second, 4)) if step not in AFTER_MASKING}
        assert_is_sum(total, [client for client in CLIENTS if client not in gone])


@pytest.mark.parametrize("dropped", [{}, {"masked": {2}}])
@pytest.mark.parametrize("masks", [True, False])
def test_the_server_holds_and_hears_no_summand(masks, dropped, monkeypatch):
    """It is looked for in every byte; without masks, it is found."""
    if not masks:
        monkeypatch.setattr(protocol, "_add_mask", lambda tensors, key, sign: None)
    it = Round(4, dropped)
    it.run()
    clients = [client for client in CLIENTS if client not in dropped.get("masked", ())]
    of_each = {client: encoded(summand(client)) for client in clients}
    found = [client for client, content in of_each.items() if held(content, it.server, it.sent)]
    assert found == ([] if masks else clients)
    total = [tensor.numpy().tobytes() for tensor in it.server._sum.values()]
    assert held(total, it.server) == total, "what it holds is looked through"
    keys = [half._mask.private_bytes_raw() for half in it.clients.values()]
    assert not held([*keys, *(half._seed for half in it.clients.values())], it.server, it.sent)


def test_what_a_client_sends_looks_random_and_differs_in_every_round():
    first, second = Round(), Round()
    for it in (first, second):
        it.run()
    of_rounds = [it.sent[4][0]["b.weight"] for it in (first, second)]
    assert not torch.equal(*of_rounds) and not any(torch.equal(each, summand(0)["b.weight"]) for each in of_rounds)
    masks = []
    for half in (client_half(0, 1, "alone", 1), client_half(0, 1, "alone", 1)):
        half.share({0: half.keys})
        masks.append(half.mask({}, {"zeros": torch.zeros(10_000, dtype=torch.int64)})["zeros"])
    assert (masks[0] != masks[1]).all(), "its own mask follows from what nobody else knows"
    bits = masks[0].numpy().view("uint8")
    ones = int(torch.from_numpy(bits).bitwise_and(1).sum())
    assert abs(ones - 40_000) < 5 * 80_000**0.5 / 2


def change_of(step, client, change):
    """Changes one client's answer in a step."""

    def change_one(of_step, answers):
        return answers | {client: change(answers[client])} if of_step == step else answers

    return change_one


def test_a_share_that_is_withheld_makes_the_client_s_masked_tensors_useless_only_to_itself():
    """A client whose shares reach nobody is gone, as any other that drops out."""
    total = Round(change=lambda step, answers: without(answers, [1]) if step == "shares" else answers).run()
    assert_is_sum(total, [0, 2, 3, 4])


@pytest.mark.parametrize("context", ["a round", "another"])
def test_a_share_of_another_round_is_noticed(context):
    earlier = Round()
    earlier.clients = {client: client_half(client, 4, context) for client in CLIENTS}
    earlier.server.context = context
    earlier.run()
    replayed = earlier.sent[2][1]
    with pytest.raises(MaskingError, match="are not what it has sent in this round"):
        Round(change=change_of("shares", 1, lambda answer: replayed)).run()


def test_a_share_within_the_field_that_is_wrong_is_noticed():
    """Two shares are changed so that they still give a key: only commitment and public key tell."""
    for of, sentence in ((0, "own mask do not fit its commitment"), (4, "key do not fit its public key")):

        def change(step, answers, of=of):
            if step != "unmasked":
                return answers
            other = split(secrets.token_bytes(32), 4, CLIENTS)
            return {client: shares | {of: other[client]} for client, shares in answers.items()}

        with pytest.raises(MaskingError, match=sentence):
            Round(4, {"masked": {4}}, change).run()


def test_a_client_gives_its_shares_once_and_never_both_of_a_client():
    it = Round(4, {"masked": {4}})
    it.run()
    for half in (it.clients[client] for client in range(4)):
        with pytest.raises(MaskingError, match="each step of a round is taken once"):
            half.unmask({})
    of_clients = {of: {giver: shares[of] for giver, shares in it.sent[-1].items()} for of in CLIENTS}
    for client, half in it.clients.items():
        secret, other = half._seed, half._mask.private_bytes_raw()
        assert joined(of_clients[client]) == (other if client == 4 else secret)


def test_tensors_that_come_after_a_client_counted_as_gone_stay_masked():
    """The server knows its key then, and takes off the masks of all pairs: its own is left, which nobody gives away."""
    it, late = Round(4, {"masked": {4}}), {}
    mask = it.clients[4].mask

    def keep(step, answers):
        if step == "masked":
            late.update(mask(it.sent[3][4], summand(4)))
        return answers

    it.change = keep
    it.run()
    key = X25519PrivateKey.from_private_bytes(joined({giver: shares[4] for giver, shares in it.sent[-1].items()}))
    for other in range(4):
        mask_of_pair = agreed(key, it.server._keys[other].mask, "mask", "a round", other, 4)
        protocol._add_pair_mask(late, other, 4, mask_of_pair)  # the other half
    assert not any(torch.equal(late[name], tensor) for name, tensor in summand(4).items())
    protocol._add_mask(late, derived(it.clients[4]._seed, "own mask", "a round", 4), -1)
    assert all(torch.equal(late[name], tensor) for name, tensor in summand(4).items())


def shared(it):
    """A round in which clients have given each other shares, and these."""
    keys = it.server.keys({client: half.keys for client, half in it.clients.items()})
    return it, it.server.shares({client: half.share(keys) for client, half in it.clients.items()})


@pytest.mark.parametrize(
    ("survivors", "sentence"),
    [
        ([0, 1, 2], "3 clients are left, but secure aggregation needs 4"),
        ([0, 0, 1, 2], "3 clients are left"),
        ([1, 2, 3, 4], "is not among the survivors"),
        ([0, 1, 2, 3, 9], "client 9 took no part"),
    ],
)
def test_a_client_unmasks_no_smaller_sum_and_none_without_itself(survivors, sentence):
    it, shares = shared(Round())
    it.clients[0].mask(shares[0], summand(0))
    with pytest.raises(MaskingError, match=sentence):
        it.clients[0].confirm(survivors)
    with pytest.raises(MaskingError, match="each step of a round is taken once"):
        it.clients[0].confirm([*CLIENTS])
    with pytest.raises(MaskingError, match=r"only 0 of the 4 clients .* have named the same"):
        it.clients[0].unmask({client: bytes(CODE) for client in CLIENTS})


def test_a_client_refuses_keys_and_steps_that_do_not_fit():
    other = PublicKeys(b"\2" * 32, b"\3" * 32)
    for change, sentence in (
        (lambda keys: keys | {0: other}, "its own public keys are not those"),
        (lambda keys: without(keys, [0]), "its own public keys are not those"),
        (lambda keys: without(keys, [1, 2]), "3 clients are left"),
        (lambda keys: keys | {1: keys[2]}, "two clients have the same public key"),
        (lambda keys: keys | {1: PublicKeys(bytes(32), bytes([1, *bytes(31)]))}, "a public key is none"),
    ):
        halves = Round().clients
        with pytest.raises(MaskingError, match=sentence):
            halves[0].share(change({client: half.keys for client, half in halves.items()}))
    for step, arguments in (("mask", ({}, {})), ("confirm", ([0],)), ("unmask", ({},))):
        with pytest.raises(MaskingError, match="in order"):
            getattr(client_half(0, 4), step)(*arguments)


def interpolated(shares):
    """The polynomial through the shares at 0, with fractions of integers, modulo the prime only at the end."""
    points = [(client + 1, int.from_bytes(share, "big")) for client, share in shares.items()]
    value = Fraction(0)
    for i, (x, y) in enumerate(points):
        term = Fraction(y)
        for j, (other, _) in enumerate(points):
            term *= Fraction(-other, x - other) if i != j else 1
        value += term
    return value.numerator * pow(value.denominator, PRIME - 2, PRIME) % PRIME


@pytest.mark.parametrize(("threshold", "number"), [(1, 1), (2, 3), (4, 5), (7, 10)])
def test_shares_give_the_secret_as_an_interpolation_with_fractions_does(threshold, number):
    secret = secrets.token_bytes(32)
    shares = split(secret, threshold, range(number))
    for chosen in itertools.islice(itertools.combinations(range(number), threshold), 40):
        some = {client: shares[client] for client in chosen}
        assert joined(some) == secret == interpolated(some).to_bytes(32, "big")
    if threshold > 1:
        fewer = {client: shares[client] for client in range(threshold - 1)}
        assert interpolated(fewer) != int.from_bytes(secret, "big")
        again = split(secret, threshold, range(number))
        assert not {*shares.values()} & {*again.values()}


def test_keys_and_masks_are_those_of_the_standards():
    private, public, secret = (  # RFC 7748, 6.1: Alice's private key, Bob's public one, their secret
        bytes.fromhex(text)
        for text in (
            "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a",
            "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f",
            "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742",
        )
    )
    assert agreed(X25519PrivateKey.from_private_bytes(private), public, "x") == derived(secret, "x")
    # RFC 5869, A.3, without salt and purpose
    assert derived(b"\x0b" * 22).hex() == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"
    zeros = {"a": torch.zeros(3, dtype=torch.int64), "b": torch.zeros(5, dtype=torch.int64)}
    protocol._add_mask(zeros, bytes(32), 1)  # RFC 8439, A.1, test vector 1
    assert b"".join(tensor.numpy().tobytes() for tensor in zeros.values()).hex() == (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )


def test_a_mask_in_parts_is_the_whole_mask(monkeypatch):
    whole, parts = ({"a": torch.zeros(1000, dtype=torch.int64)} for _ in range(2))
    protocol._add_mask(whole, b"\5" * 32, 1)
    monkeypatch.setattr(protocol, "_CHUNK", 7)
    protocol._add_mask(parts, b"\5" * 32, 1)
    assert torch.equal(whole["a"], parts["a"]) and whole["a"].count_nonzero() == 1000


def test_sizes_are_those_that_messages_are_checked_by():
    it = Round()
    it.run()
    sizes = {len(content) for encrypted, _ in it.sent[2].values() for content in encrypted.values()}
    assert sizes == {ENCRYPTED}
    assert {len(code) for codes in it.sent[5].values() for code in codes.values()} == {CODE}


class Lying:
    """A server that passes on genuine keys, and tells each client what it likes about the others.

    Args:
        keys: whose keys each client gets.
        masking: whose shares each client gets.
        survivors: whom each client is told to be the survivors.

    Attributes:
        refused: why clients refuse, by client.
        shares: the shares that clients give, by giver and whose secret they are of.
    """

    def __init__(self, halves, keys, masking, survivors):
        self.halves, self.survivors, self.refused = halves, survivors, {}
        encrypted = self._each(keys, lambda half, of: half.share({each: halves[each].keys for each in of})[0])
        self.masking, self.masked = masking, self._each(masking, lambda half, of: self._masked(half, of, encrypted))
        codes = self._each(survivors, lambda half, of: half.confirm(of))
        of_others = {each: {other: codes[other].get(each, b"") for other in codes} for each in halves}
        self.shares = self._each(of_others, lambda half, of: half.unmask(of))

    @staticmethod
    def _masked(half, of, encrypted):
        others = {each: encrypted[each][half.client] for each in of if each != half.client}
        return half.mask(others, summand(half.client))

    def _each(self, lists, answer):
        """What clients answer that have not refused anything before, each to its own list."""
        answers = {}
        for client in self.halves.keys() - self.refused.keys():
            try:
                answers[client] = answer(self.halves[client], lists[client])
            except (MaskingError, KeyError) as error:  # or the server has nothing to pass on
                self.refused[client] = str(error)
        return answers

    def secret(self, client, survived):
        """A client's seed, or the key of its masks, from the shares of those that were told so; None without enough."""
        of_all = {giver: shares[client] for giver, shares in self.shares.items() if client in shares}
        told = {giver: share for giver, share in of_all.items() if (client in self.survivors[giver]) == survived}
        threshold = self.halves[client].threshold
        return joined(dict([*told.items()][:threshold])) if len(told) >= threshold else None

    def unmasked(self, client):
        """A client's summand, from its own seed and the keys of all pairs; None if one of these is not known."""
        seed, key = self.secret(client, True), self.secret(client, False)
        if seed is None or client not in self.masked:
            return None
        tree = self.masked[client]
        protocol._add_mask(tree, derived(seed, "own mask", "a round", client), -1)
        for other in {*self.masking[client]} - {client}:
            one, two = (key, other) if key else (self.secret(other, False), client)
            if one is None:
                return None
            private, pair = X25519PrivateKey.from_private_bytes(one), sorted((client, other))
            mask = agreed(private, self.halves[two].keys.mask, "mask", "a round", *pair)
            protocol._add_pair_mask(tree, other, client, mask)
        return tree


def with_all_keys(num_clients, threshold):
    """All get the keys of all; the last ones are told that client 0 has gone, and the others that all are left."""
    everyone = [*range(num_clients)]
    gone = dict.fromkeys(everyone[-threshold:], everyone[1:])
    return *[dict.fromkeys(everyone, everyone)] * 2, dict.fromkeys(everyone, everyone) | gone


def with_overlapping_keys():
    """Each client gets the keys of five, but not of the same five: those of 1 and 2 are unmasked by 5 to 7 and 8 to 10.

    Client 0 is told that it is in a sum with 1 and 2.
    """
    of_1, of_2 = (5, 6, 7), (8, 9, 10)
    keys = {0: [0, 1, 2, 3, 4], 1: [0, 1, *of_1], 2: [0, 2, *of_2], 3: [0, 1, 2, 3, 4], 4: [0, 1, 2, 3, 4]}
    keys |= {each: [1, *of_1, 11] for each in of_1} | {each: [2, *of_2, 11] for each in (*of_2, 11)}
    masking = {0: [0, 1, 2], 1: [0, 1, 5], 2: [0, 2, 8], 3: [0, 3, 4], 4: [0, 3, 4], 11: [8, 9, 11]}
    masking |= {each: [1, *of_1] for each in of_1} | {each: [2, *of_2] for each in of_2}
    survivors = masking | {each: of_1 for each in of_1} | {each: of_2 for each in of_2}
    return keys, masking, survivors


ATTACKS = {
    "12 clients, cohorts of 5": (12, 5, 4, with_all_keys(12, 4), "12 clients have sent keys, but .* allows 5"),
    "threshold 3": (12, 5, 3, with_all_keys(12, 3), "12 clients have sent keys, but .* allows 5"),
    "20 clients, cohorts of 4": (20, 4, 3, with_all_keys(20, 3), "20 clients have sent keys, but .* allows 4"),
    "never too many keys": (12, 5, 3, with_overlapping_keys(), "are not what it has sent in this round"),
}


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("name", ATTACKS)
def test_a_server_that_lies_unmasks_no_single_update(name, checks, monkeypatch):
    """With genuine keys of more clients than a cohort has; without the checks, it does, to the last bit."""
    num_clients, cohort, threshold, lies, refusal = ATTACKS[name]
    halves = {client: client_half(client, threshold, "a round", cohort, num_clients) for client in range(num_clients)}
    if not checks:
        monkeypatch.setattr(protocol, "sha256", lambda content: hashlib.sha256())
        monkeypatch.setattr(ClientHalf, "_has_confirmed", lambda self, sender, codes: True)
        for half in halves.values():
            half.cohort = num_clients
    server = Lying(halves, *lies)
    found = server.unmasked(0)
    if checks:
        assert found is None and re.search(refusal, server.refused[0])
        return
    assert found is not None and all(torch.equal(found[each], tensor) for each, tensor in summand(0).items())


def answers_about(half, survivors, agree):
    """Whose seed and whose key a client gives a share of if it and some others are told these survivors."""
    half._step, half._shares = 2, dict.fromkeys(CLIENTS, (True, False))
    half.confirm(survivors)
    half._has_confirmed = lambda sender, codes: sender in codes
    try:
        return half.unmask(dict.fromkeys(agree, b""))
    except MaskingError:
        return {}


@pytest.mark.slow
@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("threshold", [3, 4])
def test_no_lies_about_survivors_give_the_sum_of_fewer_than_the_threshold(threshold, checks):
    """All sets of lists for five clients; without the check, sums of two are found, whose threshold is three."""
    halves = {client: client_half(client, threshold) for client in CLIENTS}
    keys = {client: half.keys for client, half in halves.items()}
    for half in halves.values():
        half.share(keys)
    told = [each for n in range(threshold, 6) for each in itertools.combinations(CLIENTS, n)]
    of_client = [[each for each in told if client in each] for client in CLIENTS]
    given, smallest = {}, 5
    for lists in itertools.product(*of_client):
        seeds, pairs = [0] * 5, [0] * 5
        for client, survivors in enumerate(lists):
            agree = tuple(each for each in survivors if lists[each] == survivors) if checks else survivors
            if (client, survivors, agree) not in given:
                given[client, survivors, agree] = answers_about(halves[client], survivors, agree)
            for of, is_seed in given[client, survivors, agree].items():
                (seeds if is_seed else pairs)[of] += 1
        known = [number >= threshold for number in seeds], [number >= threshold for number in pairs]
        assert not any(map(all, zip(*known, strict=True))), "both masks of a client"
        if sum(known[0]) and all(map(any, zip(*known, strict=True))):
            smallest = min(smallest, sum(known[0]))
    assert smallest == (2 if threshold == 3 and not checks else threshold)


def test_a_client_refuses_a_threshold_that_two_groups_of_its_cohort_reach_and_ids_of_no_client():
    for threshold, cohort in ((2, 4), (2, 5), (6, 12)):
        with pytest.raises(MaskingError, match=f"is {threshold}, but must be more than half of the cohort of {cohort}"):
            client_half(0, threshold, cohort=cohort)
    halves = {client: client_half(client, 3, num_clients=5) for client in (0, 1, 5)}
    with pytest.raises(MaskingError, match="client 5 is none of 5"):
        halves[0].share({client: half.keys for client, half in halves.items()})


def test_a_hostile_client_s_wrong_code_costs_nobody_else_anything():
    """The server cannot check codes; a client goes by those of the others."""
    wrong = change_of("confirmed", 1, lambda codes: {other: code[::-1] for other, code in codes.items()})
    assert_is_sum(Round(4, change=wrong).run(), CLIENTS)


def test_clients_that_were_told_different_things_about_shares_or_survivors_give_no_share():
    it, shares = shared(Round(3))
    for client, half in it.clients.items():
        some = {other: share for other, share in shares[client].items() if client % 2 or other != 4}
        half.mask(some, summand(client))
    codes = {client: it.clients[client].confirm([0, 1, 2, 3]) for client in range(4)}
    for client in range(4):
        with pytest.raises(MaskingError, match="only 2 of the 3 clients that secure aggregation needs"):
            it.clients[client].unmask({other: codes[other][client] for other in range(4) if other != client})
