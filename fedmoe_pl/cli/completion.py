"""``fedmoe completion``: a script with which a shell completes commands, options and values, without Python."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from jsonargparse import ArgumentParser
from lightning.pytorch import Callback
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from fedmoe_pl.cli.listing import KINDS
from fedmoe_pl.cli.packaged import folder, names
from fedmoe_pl.cli.schema import Argument, arguments_of, arguments_of_class, sub_classes
from fedmoe_pl.cli.words import classes_of, is_list, kinds_of
from fedmoe_pl.phases.phase import Phase

DESCRIPTION = "Prints a script with which the shell completes commands, options and values"
_OF_PACKAGE = [each for classes in KINDS.values() for each in classes]
_OPTIMIZERS = [SGD, Adam, AdamW]
_DEPTH = 3  # of classes in classes whose arguments are completed
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
# Options of the command, values of the option before the word, or options of the phases of the files after --config.
# Words get their space here and folders none, because zsh knows no compopt.
_SCRIPT = r"""_fedmoe_words() {
  local each
  for each in $(compgen -W "$1" -- "$2"); do COMPREPLY+=("$3$each "); done
}
_fedmoe_files() {
  local each quoted
  while IFS= read -r each; do
    [[ -n $each ]] || continue
    quoted=$(printf %q "$each"); quoted=${quoted/#\\~/\~}
    if [[ -d ${each/#\~/$HOME} ]]; then COMPREPLY+=("$quoted/"); else COMPREPLY+=("$quoted "); fi
  done <<< "$(compgen -f -- "$1")"
}
_fedmoe() {
  local word=${COMP_WORDS[COMP_CWORD]} option=${COMP_WORDS[COMP_CWORD-1]} command= each file names= prefix before i
  local lead= # of a word of zsh, which does not part words at =
  COMPREPLY=()
  [[ $word == = ]] && word=
  [[ $option == = ]] && option=${COMP_WORDS[COMP_CWORD-2]}
  if [[ $word == --*=* ]]; then
    lead=${word%%=*}= option=${word%%=*}
    word=${word#*=}
  fi
  for ((i = 1; i < COMP_CWORD; i++)); do
    each=${COMP_WORDS[i]} before=${COMP_WORDS[i-1]}
    [[ $before == = ]] && before=${COMP_WORDS[i-2]}
    [[ -z $command && " $_fedmoe_commands " == *" $each "* ]] && command=$each
    [[ $each == --config=* ]] && { before=--config; each=${each#*=}; }
    [[ $before == --config || $before == -c ]] || continue
    file=$each; [[ -f $file ]] || file=$_fedmoe_folder/$each.yaml
    [[ -f $file ]] && names+=$(sed -n 's/^.*[-{] *name: *["'\'']\{0,1\}\([^,}#"]*[^,}#"'\'' ]\).*$/\1/p' "$file")$'\n'
  done
  while IFS= read -r each; do
    [[ -n $each ]] || continue
    prefix=--federation.phases.$(printf %q "$each").
    if [[ $word == "$prefix"* ]]; then
      _fedmoe_words "$_fedmoe_of_phase" "${word#"$prefix"}" "$prefix"
    elif [[ $word == -* && $prefix == "$word"* ]]; then
      COMPREPLY+=("$prefix")
    elif [[ $option == "$prefix"* ]]; then
      option=.${option#"$prefix"}
    elif [[ $option == --method && $(printf %q "$each") == "$word"* ]]; then
      COMPREPLY+=("$(printf %q "$each") ")
    fi
  done <<< "$names"
  if [[ -z $command ]]; then
    _fedmoe_words "$_fedmoe_commands --help --version" "$word"
  elif [[ $word == --federation.phases.* || $option == --method ]]; then
    :
  elif [[ $word == -* ]]; then
    _fedmoe_words "$(_fedmoe_options "$command")" "$word"
  elif [[ $option == --config || $option == -c || $command == configs ]]; then
    _fedmoe_words "$_fedmoe_configs" "$word"
    _fedmoe_files "$word"
  elif [[ $command == list || $command == completion ]]; then
    _fedmoe_words "$(_fedmoe_values "$command")" "$word"
  elif [[ $option == -* || $option == .* || $command == report ]]; then
    _fedmoe_words "$(_fedmoe_values "$option")" "$word"
    [[ ${#COMPREPLY[@]} == 0 ]] && _fedmoe_files "$word"
  else
    _fedmoe_words "$(_fedmoe_options "$command")" "$word"
  fi
  if [[ -n $lead && ${#COMPREPLY[@]} != 0 ]]; then COMPREPLY=("${COMPREPLY[@]/#/$lead}"); fi
}
complete -o nospace -F _fedmoe fedmoe
"""


def completion_parser() -> ArgumentParser:
    """The parser of ``fedmoe completion``."""
    parser = ArgumentParser(prog="fedmoe completion", description=DESCRIPTION, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("shell", choices=["bash", "zsh"], help="the shell")
    return parser


def script(shell: str, parsers: Mapping[str, ArgumentParser]) -> str:
    """The script of ``fedmoe completion``.

    Args:
        shell: ``bash`` or ``zsh``.
        parsers: the parser of each command.
    """
    options = {command: _options(arguments_of(parser), "--") for command, parser in parsers.items()}
    common = set.intersection(*({*each} for each in options.values() if any("." in name for name in each)))
    of_phase = _options(arguments_of_class(Phase), "", 2)
    options_and_words = [*options.values(), {f".{name}": words for name, words in of_phase.items()}]
    values = {option: words for each in options_and_words for option, words in each.items() if words}
    values |= {"list": [*KINDS], "completion": ["bash", "zsh"]}
    own = {command: [*sorted({*each} - common), "--help"] for command, each in options.items()}
    cases = [
        f"    {command}) echo {_quoted(['$_fedmoe_common', *own[command]] if common <= {*each} else own[command])};;"
        for command, each in options.items()
    ]
    lines = [
        f"# Completes fedmoe in {shell}; written by `fedmoe completion {shell}`.",
        f"_fedmoe_commands={_quoted(options)}",
        f"_fedmoe_common={_quoted(sorted(common))}",
        f"_fedmoe_folder={shlex.quote(str(folder()))}",
        f"_fedmoe_configs={_quoted(names())}",
        f"_fedmoe_of_phase={_quoted(of_phase)}",
        *("_fedmoe_options() {", "  case $1 in", *cases, "  esac", "}"),
        *("_fedmoe_values() {", "  case $1 in"),
        *(f"    {option}) echo {_quoted(words)};;" for option, words in values.items()),
        *("  esac", "}"),
    ]
    return (_ZSH if shell == "zsh" else "") + "\n".join(lines) + "\n" + _SCRIPT


def _quoted(words: Iterable[str]) -> str:
    return f'"{" ".join(words)}"'


def _options(arguments: Mapping[str, Argument], prefix: str, depth: int = _DEPTH) -> dict[str, list[str]]:
    """The options of some arguments, also those of the package's classes in them, with the words for their values."""
    options: dict[str, list[str]] = {}
    for name, (hint, _, _) in arguments.items():
        kinds = kinds_of(hint)
        items = [kind for each in kinds if is_list(each) for kind in kinds_of(get_args(each)[0])]
        classes = [] if str in kinds else _classes(kinds)  # texts are shorter, such as "cpu" for an accelerator
        words = [*(word for kind in kinds for word in _words(kind)), *(each.__name__ for each in classes)]
        options[f"{prefix}{name}"] = [] if words == ["null"] else words
        if listed := _classes(items):
            options[f"{prefix}{name}+"] = [each.__name__ for each in listed]
        for each in classes if depth else []:
            if each in _OF_PACKAGE or each in _OPTIMIZERS:
                below = _options(arguments_of_class(each), f"{prefix}{name}.init_args.", depth - 1)
                options |= {option: words for option, words in below.items() if option not in options}
    return options


def _words(kind: Any) -> list[str]:
    """The words that are values of a type."""
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    return {bool: ["true", "false"], type(None): ["null"]}.get(kind, []) if isinstance(kind, type) else []


def _classes(kinds: Sequence[Any]) -> list[type]:
    """The classes that can be named where one of these types is wanted."""
    bases = tuple(base for kind in kinds for base in classes_of(kind))
    if nn.Module in bases:
        return KINDS["experts"]
    if Optimizer in bases:
        return _OPTIMIZERS
    found = [each for each in _OF_PACKAGE if issubclass(each, bases)]
    others = [each for each in sub_classes(bases) if each.__module__.startswith(("torch", "lightning"))]
    others = [each for each in others if each not in bases and not inspect.isabstract(each)]
    others = sorted({*others} - {*found}, key=lambda each: each.__name__)
    return [*found, *others] if Callback in bases else found or others
