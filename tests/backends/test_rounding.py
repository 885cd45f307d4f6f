"""How trials compute on a GPU."""

import pickle

import pytest
import torch

from fedmoe_pl.backends.rounding import in_full_precision, precisions


def settings():
    values = [torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32]
    if hasattr(torch.backends.cudnn, "conv"):
        values += [torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision]
    return values


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_settings_of_a_user_are_back_afterwards(precision):
    torch.set_float32_matmul_precision(precision)
    try:
        before = settings()
        with pytest.raises(ValueError, match="in between"), in_full_precision():
            assert settings()[:2] == ["highest", False]
            raise ValueError("in between")
        assert settings() == before
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="since torch 2.9")
def test_settings_that_older_functions_refuse_to_read_are_no_problem():
    convolutions = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # others stay: the older ones have only one word for all
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with in_full_precision():
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert [each.args[-1] for each in pickle.loads(pickle.dumps(precisions()))] == ["tf32", "ieee", "tf32"]
    finally:
        torch.backends.cudnn.conv.fp32_precision = convolutions
        torch.set_float32_matmul_precision("highest")
