"""Transformers: BERT-base (Devlin et al. 2019) and the base model of Vaswani et al. 2017."""

from __future__ import annotations

from hvd_ext.planning.models.layer import Layer, dense, norm

# CommLib's Transformer has 110 million parameters (Section 5.3) and gives no vocabulary. With three matrices of this
# many rows, for the source, the target and the output, the base model of Vaswani et al. has as many.
_VOCABULARY = 43_000


def bert_base(tokens: int = 128) -> list[Layer]:
    """Lists the layers of BERT-base with its pooler: 109.5 million parameters, 199 tensors."""
    width, inner = 768, 3072
    embeddings = (("word", 30522 * width), ("position", 512 * width), ("type", 2 * width))
    layers = [Layer("embeddings", tuple((f"embeddings/{name}", n) for name, n in embeddings), 0.0)]
    layers.append(norm("embeddings_norm", width, tokens))
    for number in range(12):
        layers += _attention(f"layer{number}/attention", width, tokens, tokens)
        layers += _feed_forward(f"layer{number}", width, inner, tokens)
    return [*layers, dense("pooler", width, width, 1)]


def transformer_base(tokens: int = 256) -> list[Layer]:
    """Lists the layers of a Transformer: 110 million parameters, as CommLib's (Section 5.3).

    Sentences have 256 words, as CommLib's (Section 5.5.2).
    """
    width, inner = 512, 2048
    layers = [Layer("source", (("source/embedding", _VOCABULARY * width),), 0.0)]
    for number in range(6):
        layers += _attention(f"encoder{number}/attention", width, tokens, tokens)
        layers += _feed_forward(f"encoder{number}", width, inner, tokens)
    layers.append(Layer("target", (("target/embedding", _VOCABULARY * width),), 0.0))
    for number in range(6):
        layers += _attention(f"decoder{number}/attention", width, tokens, tokens)
        layers += _attention(f"decoder{number}/cross", width, tokens, tokens)
        layers += _feed_forward(f"decoder{number}", width, inner, tokens)
    return [*layers, dense("output", width, _VOCABULARY, tokens, bias=False)]


def _attention(name: str, width: int, tokens: int, others: int) -> list[Layer]:
    projections = [dense(f"{name}/{part}", width, width, tokens) for part in ("query", "key", "value", "output")]
    # The scores and their product with the values, which have no parameters, count with the projection after them.
    last = projections[-1]
    projections[-1] = Layer(last.name, last.tensors, last.forward_macs + 2.0 * tokens * others * width)
    return [*projections, norm(f"{name}/norm", width, tokens)]


def _feed_forward(name: str, width: int, inner: int, tokens: int) -> list[Layer]:
    return [
        dense(f"{name}/inner", width, inner, tokens),
        dense(f"{name}/outer", inner, width, tokens),
        norm(f"{name}/norm", width, tokens),
    ]
