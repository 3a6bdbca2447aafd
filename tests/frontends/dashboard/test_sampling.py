import os

from tests.frontends.dashboard.kit import Scene

from weir.frontends.dashboard.sampling import DashboardSampler, use_of


def test_a_sample_has_what_changed_since_the_one_before() -> None:
    scene = Scene("square", "idle")

    async def script() -> None:
        await scene.ask("square", 1, 2)
        first, present = scene.sampler.sample()
        assert first is None
        assert present["models"]["square"]["counts"]["rows"][-1] == 2
        scene.now += 1.25
        await scene.ask("square", 3, 4, 5)
        second, present = scene.sampler.sample(late=0.25)
        assert second is not None
        assert (second["seconds"], second["late"], second["at"]) == (1.25, 0.25, 1_000_101.25)
        assert set(second["models"]) == {"square"}
        assert second["models"]["square"]["rows"][-1] == 3
        assert second["models"]["square"]["ends"] == {"python": {"ok": 3}}
        assert present["models"]["square"]["counts"]["rows"][-1] == 5
        scene.now += 1
        third, _ = scene.sampler.sample()
        assert third is not None
        assert third["models"] == {}

    scene.play(script)


def test_levels_workers_and_settings() -> None:
    scene = Scene("square", max_batch_size=7)

    async def script() -> None:
        _, present = scene.sampler.sample()
        model = present["models"]["square"]
        assert model["ready"] is True
        assert model["levels"]["waiting"] == 0
        assert [(worker["index"], worker["state"]) for worker in model["workers"]] == [(0, "ready")]
        assert model["settings"]["max_batch_size"] == 7

    scene.play(script)
    _, present = scene.sampler.sample()
    assert present["models"]["square"]["ready"] is False
    assert present["models"]["square"]["reason"]


def test_without_metrics_there_are_levels_only() -> None:
    scene = Scene("square")
    _, present = DashboardSampler(scene.registry, None).sample()
    assert "counts" not in present["models"]["square"]
    assert present["models"]["square"]["levels"]["waiting"] == 0


def test_the_use_of_processes() -> None:
    use = use_of(os.getpid())
    assert use is not None
    assert use.memory_bytes > 1 << 20
    assert use.cpu > 0
    assert use_of(1 << 30) is None
    scene = Scene("square")
    scene.sampler.sample()
    changes, present = scene.sampler.sample()
    assert changes is not None
    assert present["machine"]["memory_bytes"] > 1 << 20
    assert 0 <= changes["machine"]["cpu"] < present["machine"]["cpu"]
    assert present["machine"]["workers_memory_bytes"] == 0


def test_clients_are_those_that_products_tell_of_and_bounded() -> None:
    scene = Scene("square")
    told = [{"client": f"client {number}", "requests": number} for number in range(150)]
    _, present = DashboardSampler(scene.registry, scene.metrics, clients=lambda: told).sample()
    assert present["clients"] == told[:20]
    assert scene.sampler.sample()[1]["clients"] == []
