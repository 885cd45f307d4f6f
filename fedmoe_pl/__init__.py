"""Personalized federated learning with mixtures of experts, as ordinary PyTorch Lightning.

The names are in ``__init__.pyi``, and what they stand for is imported when it is first used: the command line answers
``fedmoe --help`` without torch and Lightning, which take seconds.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
