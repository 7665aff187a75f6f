"""How clients of OpenAI ask for JSON and for calls of functions."""

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from diffray.cluster.api.messages import NOTED, StrictModel
from diffray.components.grammar.structured import StructuredOutputs


class JsonSchema(StrictModel):
    """A schema as OpenAI's clients send it; answers always follow it, strict or not."""

    name: str = ""
    description: str = Field("", description=NOTED)
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool = Field(False, description=NOTED)


class ResponseFormat(StrictModel):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    bare_schema: dict[str, Any] | None = Field(
        None, alias="schema", description="Of a json_object; as llama.cpp's clients send it."
    )

    @model_validator(mode="after")
    def _a_schema_for_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('"json_schema" is the type of a response_format with a json_schema')
        if self.bare_schema is not None and self.type != "json_object":
            raise ValueError('"json_object" is the type of a response_format with a schema')
        return self

    @property
    def structured(self) -> StructuredOutputs | None:
        if self.json_schema is not None:
            return StructuredOutputs(json=self.json_schema.json_schema)
        if self.bare_schema is not None:
            return StructuredOutputs(json=self.bare_schema)
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


class ToolFunction(StrictModel):
    model_config = ConfigDict(extra="ignore")

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict, description="A JSON schema.")
    strict: bool | None = Field(None, description="Arguments always follow their schema.")


class Tool(StrictModel):
    type: Literal["function"]
    function: ToolFunction


class FunctionName(StrictModel):
    name: str


class NamedTool(StrictModel):
    type: Literal["function"] = "function"
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool
