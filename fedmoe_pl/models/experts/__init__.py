"""Networks of the papers, each split in an ``extractor`` and a ``classifier``.

The split is a convention, not a base class: any ``nn.Module`` is an expert, and one with these two attributes and
``forward(x) == classifier(extractor(x))`` can also be personalized by its classifier (PFL-FB) and give its features to
a gate (PFL-MFE). Constructor arguments are kept as attributes of the same name, so that a checkpoint can rebuild the
expert; ``input_shape`` lets a gate size itself.
"""
