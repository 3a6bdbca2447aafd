"""Serve models with dynamic batching: requests pool behind the weir; at the control limit, a batch flows over.

    class Square(weir.Model):
        def predict(self, batch):
            return [x * x for x in batch]

In process, `weir.Service` and its blocking twin `weir.BlockingService`; over HTTP, `weir serve module:Class` or
`weir.asgi(...)` in a server of your own.
"""
