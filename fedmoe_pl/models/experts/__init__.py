"""Networks of the papers, each split into an ``extractor`` and a ``classifier``.

They share a base, but the split is a convention: any ``nn.Module`` can be an expert. If it has these two attributes and
``forward(x) == classifier(extractor(x))``, its classifier can be personalized alone (PFL-FB), and a gate can read its
features (PFL-MFE). Constructor arguments are kept as attributes of the same names, so that a checkpoint can rebuild the
expert; a mixture uses ``input_shape`` to size lazy gates.
"""
