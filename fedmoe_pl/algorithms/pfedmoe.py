"""pFedMoE: Yi, Yu, Ren, Zhang, Wang, Liu, Li, 2024, Algorithm 1 (https://arxiv.org/abs/2402.01350).

FedAvg averages a small extractor that all clients have. A large extractor, the header and the gate never leave their
client. All are trained at the same time, with one loss. No official code is known. Where the paper is unclear, other
repositories of its authors were the guide:

===================  ==========================  ===============================  ====================================
topic                paper                       authors' other code              here
===================  ==========================  ===============================  ====================================
average              of the clients of a round   the model of the client that     of the clients of a round
                                                 was trained last, by mistake
weights              n_k / n                     all of a client's samples        its training samples
evaluated extractor  not said                    own copy, before aggregation     the same; ``evaluate.after:
                                                                                  aggregation`` for the server's
evaluated clients    all, in the best round      those of the round               all; ``select`` for the best round
optimizer            SGD                         one small network's for all      a new one for every client and round
                                                 clients, with the momentum of
                                                 the client before
gradient clipping    not mentioned               norm 50, of each module          ``trainer.gradient_clip_val: 50``, of
                                                                                  all parameters together
gate learning rate   separate                    the same as the rest             ``gate_lr`` of ``RepresentationMoE``
gate hidden width    unknown                     -                                ``hidden`` of ``SwitchNormGate``, 50
===================  ==========================  ===============================  ====================================

Standalone is ``Local`` with the gate ``LocalOnly``; LG-FedAvg is ``FedAvg(shared="header.*")`` with the same gate.
"""

from __future__ import annotations

from fedmoe_pl.algorithms.algorithm import Algorithm


class PFedMoE(Algorithm):
    """FedAvg of the shared extractor, evaluated after local training.

    Before aggregation, a client's model has the extractor that was trained together with its local parts. A client
    outside the cohort is evaluated with the model that it trained last, and one that was never trained with the
    server's extractor. Training always starts with the tensors that the server sends.

    Args:
        shared: glob patterns of the parameters and buffers that are averaged, weighted by the clients' numbers of
            samples.
    """

    evaluated_after = "local_training"

    def __init__(self, shared: str | list[str] = "shared_extractor.*") -> None:
        super().__init__(shared)
