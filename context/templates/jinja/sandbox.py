"""Where chat templates run: transformers' sandboxed jinja2, with an end to what a template can take."""

from __future__ import annotations

from collections.abc import Iterable
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from context.templates.jinja.bounds import Bounds, bounded_filters

_OF_DICTS = frozenset(dir(dict))
_OF_LOOPS = frozenset({"index", "index0", "first", "last"})
_PLAIN = frozenset({str, LoopContext, Namespace})


class _BoundedCode(CodeGenerator):
    """jinja2's own code with a tick in every loop, macro and block, and bounded sums and texts."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        repeated: Iterable[Any] = node.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))
        self._ticking = {id(found.body) for found in repeated}
        super().visit_Template(node, frame)

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        if id(nodes) in self._ticking:
            self.writeline("environment.tick()")
        super().blockvisit(nodes, frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        first: nodes.Expr = node
        others: list[nodes.Expr] = []
        while isinstance(first, nodes.Add):  # a + b + c: one call
            others.insert(0, first.right)
            first = first.left
        self.write("environment.added(")
        for value in (first, *others):
            self.visit(value, frame)
            self.write(", ")
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for value in node.nodes:
            self.visit(value, frame)
            self.write(", ")
        self.write("))")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("environment.text(")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """An environment for one template. Its bounds are set anew with `bounds.start()` before each rendering."""

    code_generator_class = _BoundedCode
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        self.bounds = Bounds()
        self.tick, self.added, self.joined = self.bounds.tick, self.bounds.added, self.bounds.joined
        self.text = self.bounds.text
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        self.concat = self.bounds.concat  # type: ignore[method-assign]
        self.binop_table |= {"*": self.bounds.multiplied, "**": self.bounds.raised, "%": self.bounds.modulo}
        self.filters |= bounded_filters(self.bounds, dict(self.filters))
        self.filters |= {"sum": self._sum, "join": self._join}
        for name in ("pprint", "urlize", "urlencode"):  # slow beyond bounds, and nothing a prompt needs
            del self.filters[name]
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if __obj.__class__ is BuiltinMethodType or hasattr(__obj, "__wrapped__"):
            args = __self.bounds.charge_call(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """jinja2's rule, with the way short to what is asked for most: a message's fields, its place in a loop."""
        if type(obj) is dict and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """jinja2's rule, without its looks for functions and the like at what is none."""
        return not attr.startswith("_") if type(obj) in _PLAIN else super().is_safe_attribute(obj, attr, value)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in source.find_all(nodes.For):
            if loop.test is not None:  # what a loop's condition leaves out never reaches its body
                tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
                loop.test = nodes.And(tick, loop.test).set_lineno(loop.lineno).set_environment(self)
        return super()._generate(source, *args, **kwargs)

    def _sum(self, values: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        read = make_attrgetter(self, attribute) if attribute is not None else None
        for value in values:
            self.tick()
            start = self.added(start, value if read is None else read(value))
        return start

    def _join(self, values: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
        read = make_attrgetter(self, attribute) if attribute is not None else None
        return self.joined((value if read is None else read(value) for value in values), str(d))


class _GenerationBlock(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks replies for other tools; here authors do that."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
