"""A device that a process pretends to have: memory of the CPU under another name, which PyTorch keeps apart from it.

PyTorch refuses to mix its tensors with the CPU's, as it does with a GPU's, and its own checks are at work: of devices
in operations, of parameters that move, of generators. Results have the bits of the CPU. What it does not show is what
only CUDA has: other kernels, autocast, cuDNN, streams, memory that runs out. ``register`` changes the whole process.
"""

import copy
import ctypes
import gc

import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

from fedmoe_pl import trees

NAME = "pretended"
_EXTENSION = 12  # DLPack's number for a device that an extension defines
_MIXING = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::copy_", "aten::_copy_from"}  # may mix
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_libraries = []
_swap_tensors = torch.utils.swap_tensors


class Accelerator(CUDAAccelerator):
    """Lightning's accelerator for the device; one of CUDA, because a Trainer takes others to the CPU."""

    def setup_device(self, device):
        assert device.type == NAME

    def setup(self, trainer):
        pass

    def teardown(self):
        pass

    @staticmethod
    def parse_devices(devices):
        return [0]

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device(NAME, 0)]

    @staticmethod
    def auto_device_count():
        return 1

    @staticmethod
    def is_available():
        return True


def can_register() -> bool:
    """Whether this release of PyTorch lets Python define a device."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


def register() -> None:
    """Adds the device to this process."""
    module = type("Module", (backend_registration._DummyBackendModule,), {"get_amp_supported_dtype": _half_precision})
    backend_registration._setup_privateuseone_for_python_backend(NAME, module())
    fallback, implementations = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(_run, "PrivateUse1")
    implementations.impl("convolution_overrideable", _on_cpu(torch.ops.aten.convolution.default), "PrivateUse1")
    implementations.impl("convolution_backward_overrideable", _on_cpu(_convolution_backward), "PrivateUse1")
    _libraries.extend((fallback, implementations))
    # parameters stay the same objects with the same attributes, as on a GPU
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.utils.swap_tensors = _swap
    trees.set_data = _set_data


def _swap(parameter: Tensor, other: Tensor) -> None:
    attributes = dict(vars(parameter))
    try:
        _swap_tensors(parameter, other)
    except RuntimeError:  # a graph in a cycle of references still has it
        gc.collect()
        _swap_tensors(parameter, other)
    vars(parameter).update(attributes)


def _set_data(parameter: torch.nn.Parameter, tensor: Tensor) -> None:
    """``parameter.data = tensor``, which PyTorch refuses for its own devices and ones that an extension defines."""
    _swap(parameter, torch.nn.Parameter(tensor, parameter.requires_grad))


def placed(datamodule, device):
    """The data module with its samples on the device; in place of ``data_on``, which asks CUDA for its memory."""
    if device.type != NAME:
        return datamodule
    datamodule = copy.copy(datamodule)
    datamodule.x = datamodule.x.to(device)
    return datamodule


def _half_precision(self):
    return [torch.bfloat16]


def _is_here(value) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _view(tensor: Tensor, like: Tensor, offset: int) -> Tensor:
    """A tensor of the device with the memory of another one, and the sizes and strides of a third."""
    return torch.ops.aten.as_strided.default.redispatch(_CPU, tensor, like.size(), like.stride(), offset)


def _moved(value: Tensor) -> Tensor:
    """A tensor of the device with the memory of one on the CPU."""
    value = value.detach().contiguous()
    memory = value.reshape(-1) if value.numel() else torch.empty(1, dtype=value.dtype)
    capsule = torch.utils.dlpack.to_dlpack(memory)
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    device = (ctypes.c_int32 * 2).from_address(pointer_of(capsule, b"dltensor") + 8)  # behind the pointer to the data
    device[0], device[1] = _EXTENSION, 0
    return _view(torch._C._from_dlpack(capsule), value, 0)


def _real(tensor: Tensor) -> Tensor:
    """The same memory as a tensor on the CPU."""
    storage = tensor.untyped_storage()
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=storage.nbytes() // tensor.element_size())
    return torch.as_strided(flat, tensor.size(), tensor.stride(), tensor.storage_offset())


def _as_real(value):
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return _real(value) if _is_here(value) else value


def _on_cpu(function):
    def run(*arguments):
        return tree_map(lambda out: _moved(out) if isinstance(out, Tensor) else out, function(*_reals(arguments)))

    return run


def _reals(arguments):
    return tree_map(_as_real, arguments)


def _convolution_backward(gradient, x, weight, *settings):
    *settings, needed = settings
    bias = [len(weight)] if needed[2] else None
    return torch.ops.aten.convolution_backward(gradient, x, weight, bias, *settings, needed)


def _run(operation, *arguments, **named):
    """Runs any operation on the CPU; what it returns is new, a view of an argument, or an argument that it changed."""
    schema = operation._schema
    given = [*zip(schema.arguments, arguments, strict=False)]
    given += [(argument, named[argument.name]) for argument in schema.arguments if argument.name in named]
    values = [value for _, value in given]
    plain = [value.dim() for value in values if isinstance(value, Tensor) and not _is_here(value)]
    if any(plain) and schema.name not in _MIXING:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {schema.name} got one on the cpu")
    if schema.name == "aten::_copy_from":
        source, target = _reals(arguments[:2])
        target.copy_(source)
        return arguments[1]
    written = {name: value for argument, value in given for name in _names(argument, written=True)}
    viewed = [value for argument, value in given if _names(argument, written=False) and _is_here(value)]
    # an output without elements is made as large as it has to be
    changed = [value for value in written.values() if _is_here(value) and not value.numel()]
    outs = {name: value for name, value in named.items() if any(value is other for other in changed)}
    fresh = {name: torch.empty(0, dtype=value.dtype) for name, value in outs.items()}
    with torch.no_grad():
        result = operation(*_reals(arguments), **{**_reals(named), **fresh})
    for name, value in outs.items():
        made = _moved(fresh[name])
        replace = torch.ops.aten.set_.source_Storage_storage_offset
        replace.redispatch(_CPU, value, made.untyped_storage(), 0, made.size(), made.stride())
    if not isinstance(result, (tuple, list)):
        return _returned(schema.returns[0], result, written, viewed) if schema.returns else None
    kinds = [schema.returns[min(place, len(schema.returns) - 1)] for place in range(len(result))]
    return type(result)(_returned(kind, value, written, viewed) for kind, value in zip(kinds, result, strict=True))


def _returned(kind, value, written: dict[str, Tensor], viewed: list[Tensor]):
    """What the device returns for a result on the CPU."""
    if not isinstance(value, Tensor):
        return value
    if names := _names(kind, written=True):
        return written[names[0]]
    if _names(kind, written=False) and viewed:
        return _view(viewed[0], value, value.storage_offset())
    return _moved(value)


def _names(argument, written: bool) -> list[str]:
    alias = argument.alias_info
    return [*alias.before_set] if alias is not None and alias.is_write == written else []
