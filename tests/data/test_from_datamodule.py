"""What a LightningDataModule's setup and loaders say is done, or refused."""

import multiprocessing

import torch
from helpers.data import refused_argument, set_up
from helpers.map_style import DictData, Dicts, padded
from torch.utils.data import DataLoader, RandomSampler, random_split

from fedmoe_pl.data import FromDataModule


class Split(DictData):
    def setup(self, stage):
        super().setup(stage)
        if stage == "fit":
            self.training, self.rest = random_split(Dicts(22), [12, 10])


def test_what_setup_draws_depends_on_the_partition_seed_alone():
    drawn = []
    for seed, partition_seed in ((0, 0), (1, 0), (1, 1)):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        module = Split()
        set_up(FromDataModule(module, targets="label", num_clients=2, partition_seed=partition_seed))
        assert torch.equal(torch.get_rng_state(), state)
        drawn.append([*module.training.indices])
    assert drawn[0] == drawn[1] != drawn[2]


def test_each_process_that_reads_samples_is_begun_by_the_loader_s_function():
    begun = multiprocessing.Queue()

    class Begun(DictData):
        def train_dataloader(self):
            return DataLoader(self.training, collate_fn=padded, num_workers=1, worker_init_fn=begun.put)

    data = set_up(FromDataModule(Begun(), targets="label", num_clients=2))
    assert len([*data.batches(data.train_samples[0])]) == 11
    assert begun.get(timeout=60) == 0


class Drawn(DictData):
    def __init__(self, **arguments):
        super().__init__()
        self.sampling = arguments

    def train_dataloader(self):
        return DataLoader(self.training, sampler=RandomSampler(self.training, **self.sampling), collate_fn=padded)


def test_a_random_sampler_of_all_samples_is_the_same_as_shuffling():
    assert set_up(FromDataModule(Drawn(), targets="label", num_clients=2)).num_clients == 2
    for drawn in (Drawn(replacement=True), Drawn(num_samples=7)):
        assert refused_argument(lambda drawn=drawn: FromDataModule(drawn, num_clients=2)) == "datamodule"
