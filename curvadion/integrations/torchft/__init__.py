"""Replicas that come and go, as torchft tracks them (the extra ``torchft``)."""

from curvadion.integrations.torchft.data import ElasticBatchSampler
from curvadion.integrations.torchft.replicas import ElasticReplicas

__all__ = ["ElasticBatchSampler", "ElasticReplicas"]
