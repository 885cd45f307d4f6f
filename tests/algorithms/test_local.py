"""Clients that train alone, against closed forms."""

import torch
from helpers import OneWeight, PureOneWeight, phase, quadratic, run, two_quadratics
from helpers.quadratics import MINIMA, REMAINS, STEPS

from fedmoe_pl.algorithms import Local


def test_local_clients_each_reach_their_own_closed_form_from_the_same_start(tmp_path):
    federation = run([phase("Local", Local(), rounds=3)], PureOneWeight(start=2.0), two_quadratics(), tmp_path, STEPS)
    for client in (0, 1):
        expected = MINIMA[client] + REMAINS[client] ** 3 * (2.0 - MINIMA[client])
        weight = federation.client_module("Local", client).weight.detach()
        torch.testing.assert_close(weight, expected, rtol=1e-13, atol=0)


def test_a_client_that_trains_back_to_the_initial_model_keeps_no_older_one(tmp_path):
    # With rate 2 a step from w mirrors it at b: 2 -> 4 -> 2 where b = 3 and a = 1.
    datamodule = two_quadratics()
    datamodule.setup()
    datamodule.x = torch.tensor([[1.0, 3.0]] * 4).double()
    for rounds, expected in ((1, 4.0), (2, 2.0), (3, 4.0)):
        model = PureOneWeight(lr=2.0, start=2.0)
        federation = run([phase("Local", Local(), rounds=rounds)], model, datamodule, tmp_path, 1)
        assert federation.client_module("Local", 0).weight.item() == expected


def test_a_method_that_a_users_module_holds_as_an_attribute_is_that_of_the_clients_own_copy(tmp_path):
    class WithMethod(OneWeight):
        def __init__(self):
            super().__init__()
            self.criterion = self.own_loss

        def own_loss(self, x):
            return quadratic(self.weight, x)

        def training_step(self, batch, batch_idx):
            return self.criterion(batch[0])

    federation = run([phase("Local", Local())], WithMethod(), two_quadratics(), tmp_path, STEPS)
    weight = federation.client_module("Local", 1).weight.detach()
    torch.testing.assert_close(weight, MINIMA[1] - REMAINS[1] * MINIMA[1], rtol=1e-13, atol=0)
