"""The stages of a Megatron model, made by a function of your own: here the default ones, with frozen routers.

--train-backend megatron --custom-model-provider-path examples/plugins/model_provider.py
"""


def model_provider(pre_process, post_process, vp_stage=None, *, default):
    """`default` makes the stage as it would be made; `config`, its TransformerConfig, is given to whoever asks too."""
    stage = default()
    for name, parameter in stage.named_parameters():
        if ".router." in name:
            parameter.requires_grad_(False)
    return stage
