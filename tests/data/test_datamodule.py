"""The data module: what it holds, how it is seeded, and in a plain Trainer."""

import numpy as np
import pytest
import torch
from helpers.data import Own, set_up, vectors
from helpers.models import trainer

from fedmoe_pl.data import IID, Arrays, Digits, Dirichlet, RandomCrop
from fedmoe_pl.models import PersonalizedMoE, SmallMLP


@pytest.mark.parametrize("fractions", [(0.0, 0.0), (0.3, 0.0), (0.0, 0.25), (0.05, 0.9)])
def test_every_client_splits_its_samples_by_a_seed_of_its_own(fractions):
    partitioner = Dirichlet(0.9)
    data = Own(vectors(500), num_clients=20, partitioner=partitioner, partition_seed=3)
    data.test_fraction, data.validation_fraction = fractions
    data.setup()
    rng = np.random.default_rng(np.random.SeedSequence(3))
    for client, part in enumerate(partitioner(data.y[:500].numpy(), 20, rng)):
        n_test = min(round(len(part) * fractions[0]), len(part) - 1)
        n_validation = min(round(len(part) * fractions[1]), len(part) - 1 - n_test)
        if n_test + n_validation:
            part = np.random.default_rng(np.random.SeedSequence(3, spawn_key=(client,))).permutation(part)
        held = [data.test_samples[client], data.validation_samples[client], data.train_samples[client]]
        for own, expected in zip(held, np.split(part, [n_test, n_test + n_validation]), strict=True):
            assert own.tolist() == expected.tolist()


def test_setup_is_idempotent():
    data = set_up(Own(vectors(10), num_clients=2))
    x, parts = data.x, data.train_samples
    data.setup("test")
    assert data.x is x and data.train_samples is parts


def test_of_pooled_images_only_training_images_are_learned_from():
    images = torch.randint(256, (12, 1, 2, 2), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    arrays = Arrays(images[:8], torch.arange(8) % 2, images[8:], torch.arange(4) % 2)
    data = Own(arrays, num_clients=2, test_fraction=0.25, pool=True)
    data.deal()
    data.learn_from = torch.tensor([1, 5, 9])  # the last one was a test image
    data.setup()
    values = images[[1, 5]].double() / 255
    mean, std = data.normalization
    assert (*mean, *std) == pytest.approx((values.mean().item(), values.std(correction=0).item()), rel=1e-12)


def test_natural_clients_are_the_default_and_own_their_test_samples():
    arrays = vectors(3, client_train=np.array(["b", "a", "b"]), client_test=np.array(["b", "unseen", "b", "a"]))
    warning = "^Own: client_test has 1 ids that no training sample has, such as 'unseen'; their samples are in"
    with pytest.warns(UserWarning, match=warning):
        data = set_up(Own(arrays))
    assert data.num_clients == 2
    assert [part.tolist() for part in data.train_samples] == [[1], [0, 2]]
    assert [part.tolist() for part in data.test_samples] == [[6], [3, 5]]
    dealt = set_up(Own(arrays, num_clients=2, partitioner=IID()))
    assert [len(part) for part in dealt.test_samples] == [0, 0]


# PyTorch deprecates what lightning 2.6.6 uses
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The .*_dataloader. does not have many workers")  # on more cores
def test_a_plain_trainer_takes_the_data_module_without_a_warning(tmp_path):
    data = Digits(num_clients=4, validation_fraction=0.25, augmentation=[RandomCrop(1)])
    plain, module = trainer(tmp_path, max_epochs=1), PersonalizedMoE(SmallMLP())
    plain.fit(module, data)
    assert plain.num_training_batches == -(-sum(map(len, data.train_samples)) // data.batch_size)
    assert plain.num_val_batches == [-(-sum(map(len, data.validation_samples)) // data.batch_size)]
    plain.test(module, data, verbose=False)
    predictions = plain.predict(module, data)
    assert sum(len(batch["logits"]) for batch in predictions) == len(data.global_test)


def test_there_is_no_validation_loader_without_validation_samples():
    assert set_up(Own(vectors(10), num_clients=2)).val_dataloader() == []
