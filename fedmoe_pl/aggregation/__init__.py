"""Aggregations: robust ones, differential privacy, secure aggregation, and attacks for experiments."""

from fedmoe_pl.aggregation.aggregation import Aggregation
from fedmoe_pl.aggregation.attacks import ALittleIsEnough, Attack, GaussianNoise, InnerProductManipulation, UnderAttack
from fedmoe_pl.aggregation.differential_privacy import DifferentialPrivacy
from fedmoe_pl.aggregation.robust import (
    Bucketing,
    CenteredClipping,
    CollectingAggregation,
    CoordinateMedian,
    GeometricMedian,
    MultiKrum,
    NearestNeighborMixing,
    RobustAggregation,
    TrimmedMean,
)
from fedmoe_pl.aggregation.secure import SecureAggregation

__all__ = [
    "ALittleIsEnough",
    "Aggregation",
    "Attack",
    "Bucketing",
    "CenteredClipping",
    "CollectingAggregation",
    "CoordinateMedian",
    "DifferentialPrivacy",
    "GaussianNoise",
    "GeometricMedian",
    "InnerProductManipulation",
    "MultiKrum",
    "NearestNeighborMixing",
    "RobustAggregation",
    "SecureAggregation",
    "TrimmedMean",
    "UnderAttack",
]
