"""Values of tables as standard JSON."""

import math
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any


def json_value(value: object) -> Any:
    """Convert a value to standard JSON.

    Non-finite numbers become None, dates and times ISO 8601 strings, durations seconds, and decimals floats.
    Characters that UTF-8 cannot encode become question marks. Other types become ``str(value)``.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {json_value(str(name)): json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return json_value(float(value))
    return str(value).encode("utf-8", "replace").decode()
