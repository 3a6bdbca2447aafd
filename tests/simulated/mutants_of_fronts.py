"""Faults to plant in what several fronts do with calls of gRPC, with texts and with shared memory, and in chains, in versions and in workers that
callers add: see mutants.py. Each is a module, a text in it, and what replaces it."""

OF_FRONTS = {
    "call-not-withdrawn-onward": (
        "weir.frontends.grpc.aio", "            returning.cancel()\n            onward.cancel()\n", "            returning.cancel()\n"
    ),
    "call-passed-on-nowhere": ("weir.fronts.calls", "                self._pass_on(call, body)\n", "                pass\n"),
    "name-of-an-error-lost-onward": (
        "weir.frontends.grpc.aio", 'call.end(code.value[0], text or "", trailers)', 'call.end(code.value[0], text or "")'
    ),
    "end-of-a-stream-not-passed-on": ("weir.frontends.grpc.aio", "        await onward.done_writing()\n", ""),
    "form-of-another-api": (
        "weir.text_server.fronts", "            super()._end_with(error)\n",
        "            self._texts = text_apis(self._texts.context)[0].texts[0]\n            super()._end_with(error)\n",
    ),
    "turn-of-a-withdrawn-text-kept": (
        "weir.fronts.dispatcher", "        self.turns.leave(request.turn)\n        self._handle.cancel(request)\n", "        self._handle.cancel(request)\n"
    ),
    "turn-of-a-failed-text-kept": (
        "weir.fronts.dispatcher", "            self.turns.leave(self.turn)\n            self.front.fail(self.number, error)\n", "            self.front.fail(self.number, error)\n"
    ),
    "texts-cut-off-by-a-drain": ("weir.fronts.server", "        return await self._fronts.drain_product(seconds)\n", "        return True\n"),
    "front-with-many-texts-ended": ("weir.fronts.dispatcher", "most = self._most + self._catalogue.most_texts\n", "most = self._most\n"),
    "front-started-twice": ("weir.fronts.server", "        if not had_started:", "        if False:"),
    "counts-of-a-front-lost": ("weir.text_server.fronts", "        self._scheduled = False\n        counted", "        self._scheduled = False\n        self._reset()\n        counted"),
    "place-of-a-request-never-free": ("weir.fronts.places", "        if not self._owners:\n            self._place.release()\n", "        pass\n"),
    "place-freed-while-it-is-read": ("weir.fronts.places", "        place.retain()\n        self._place = place\n", "        self._place = place\n"),
}  # fmt: skip

OF_CHAINS = {
    "error-of-a-step-under-another-name": (
        "weir.catalog.chains", "        except WeirError as error:\n            raise _at(name_of(step), error) from error\n        return {",
        "        except ModelNotFound as error:\n            raise ModelNotReady(error.message) from error\n        except WeirError as error:\n            raise _at(name_of(step), error) from error\n        return {",
    ),
    "step-unloaded-under-its-chain": ("weir.catalog.manager", "        if chains := self._dependents(name, ending):\n", "        if chains := []:\n"),
    "added-workers-forgotten-by-a-load": ("weir.catalog.manager", "range(0 if has_them else self._endpoints.added(name))", "range(0)"),
    "other-versions-lost-by-a-load": ("weir.catalog.manager", "if version and key != version}", "if False}"),
    "default-lost-by-an-unload": ("weir.catalog.manager", "self.registry.put(services, self.registry.default_of(name))", "self.registry.put(services)"),
    "version-of-a-request-ignored": ("weir.catalog.registry", "(service := self._find(name, version))", "(service := self._find(name, \"\"))"),
    "model-unloaded-with-a-worker": ("weir.catalog.manager", "        if service.worker_count > 1:\n", "        if False:\n"),
}  # fmt: skip
