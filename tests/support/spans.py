"""Who listens to the spans of a test process: OpenTelemetry lets a process have one provider, and never another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter


class _Listeners(SpanProcessor):
    """The provider's only processor, which others come to and go from: a provider itself forgets none."""

    def __init__(self) -> None:
        self.listening: tuple[SpanProcessor, ...] = ()

    def on_end(self, span: ReadableSpan) -> None:
        for one in self.listening:
            one.on_end(span)


_listeners = _Listeners()


@contextmanager
def exported_to(exporter: SpanExporter) -> Iterator[None]:
    """Hand each span that ends meanwhile to ``exporter``, on the thread that ended it, and then shut that down."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(_listeners)
        trace.set_tracer_provider(provider)
    processor = SimpleSpanProcessor(exporter)
    _listeners.listening += (processor,)
    try:
        yield
    finally:
        _listeners.listening = tuple(one for one in _listeners.listening if one is not processor)
        processor.shutdown()
