"""One rank alone, the last one, where there are more."""

from __future__ import annotations

from kvrsim.runtime.exchange.base import Exchange

EXCHANGE = Exchange
