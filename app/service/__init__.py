"""The life of requests as coroutines: the only place that knows both tiers and transfers."""
