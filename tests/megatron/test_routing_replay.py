"""Rejects router settings that routing replay cannot control; test_layouts.py compares replayed trainings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime.errors import UserError


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"moe_router_fusion": True}, "which --moe-router-fusion hides"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn chooses by other means"),
        ({"moe_router_load_balancing_type": ["none", "sinkhorn"]}, "sinkhorn chooses by other means"),
    ],
)
def test_rejects_routers_that_replay_cannot_control(settings, sentence) -> None:
    from slime.train.backends.megatron.routing_replay import check_routers

    usual = {"moe_router_fusion": False, "moe_router_load_balancing_type": "none"}
    check_routers(SimpleNamespace(**usual))
    with pytest.raises(UserError, match=sentence):
        check_routers(SimpleNamespace(**{**usual, **settings}))
