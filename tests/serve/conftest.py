"""What the tests of this folder share."""

from types import SimpleNamespace

import pytest


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    kept: dict[bytes, bytes] = {}

    def put(key: bytes, value: bytes, overwrite: bool, namespace: bytes) -> bool:
        if overwrite:
            kept[key] = value
        return kept.setdefault(key, value) is not value

    store = SimpleNamespace(
        _internal_kv_put=put,
        _internal_kv_get=lambda key, namespace: kept[key],
        _internal_kv_list=lambda prefix, namespace: [k for k in [*kept] if k.startswith(prefix)],
        _internal_kv_del=lambda key, namespace: kept.pop(key, None),
    )
    monkeypatch.setattr("diffray.cluster.serve.desired_state.internal_kv", store)
    return kept
