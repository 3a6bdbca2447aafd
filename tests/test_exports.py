import weir


def test_the_public_names_are_these() -> None:
    assert sorted(weir.__all__) == [
        "BULK", "Bank", "BlockingService", "Branch", "Cancelled", "CapacityError", "Chain", "Conflict", "DeadlineExceeded",
        "Decision", "Draining", "Example", "External", "Forbidden", "InvalidRequest", "Last", "Measure",
        "MethodNotAllowed", "Model", "ModelCrashed", "ModelError", "ModelNotFound", "ModelNotReady", "Observation",
        "Overloaded", "Policy", "Prices", "Profile", "Ray", "Reason", "Registry", "RequestError", "Service", "SettingsError",
        "SolvedPolicy", "Step", "Switch", "Tensor", "TooLarge", "Unauthorized", "Unsupported", "UnsupportedMediaType",
        "ValidationFailed", "WeirError", "WorkerLost", "__version__", "asgi", "device_group", "lifespan", "model", "profile", "running", "serve", "simulate", "solve",
    ]  # fmt: skip


def test_every_public_name_is_there_also_those_that_load_late() -> None:
    for name in weir.__all__:
        assert getattr(weir, name) is not None
    assert dir(weir) == sorted(weir.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(weir, "Servise")
