"""The embedded engine: a small torch server that speaks SGLang's HTTP dialect, for machines without SGLang.

The path of a request: `http` parses it, `engine` owns the engine's thread, `executor` runs the model's steps,
`scheduler` decides which sequences run, `kv_cache` owns the KV slots and the prefixes that they can share, and `model`
turns a batch into logits through transformers' own model code, with `attention` instead of its attention, and samples
the tokens. `loader` makes all of these from a model folder. `weight_updates` writes new weights into the model between
two steps, from the sources in `weights`. `http` imports all other rooms; none of them imports `http`.

Left out on purpose: tensor parallelism, speculative decoding, quantised weights, LoRA adapters chosen per request, and
multimodal input. SGLang is the production engine; this one lets the whole system run everywhere.
"""
