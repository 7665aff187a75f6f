"""How clients of OpenAI ask for JSON and for function calls."""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from diffray.cluster.api.chat_messages import NOTED, StrictModel
from diffray.components.grammar.json_schema import SchemaObject
from diffray.components.grammar.structured import StructuredOutputs


class JsonSchema(StrictModel):
    """A schema as OpenAI's clients send it; answers always follow it, strict or not."""

    name: str = Field("", description=NOTED)
    description: str = Field("", description=NOTED)
    json_schema: SchemaObject = Field(alias="schema", description="The schema itself.")
    strict: bool = Field(False, description=NOTED)


class ResponseFormat(StrictModel):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="text: anything; json_object: any object; json_schema: what a schema allows."
    )
    json_schema: JsonSchema | None = Field(None, description="For json_schema: the schema.")
    bare_schema: SchemaObject | None = Field(
        None, alias="schema", description="For json_object, as llama.cpp's clients send it."
    )

    @model_validator(mode="after")
    def _a_schema_for_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(
                'the type "json_schema" needs a json_schema, and only this type takes one'
            )
        if self.bare_schema is not None and self.type != "json_object":
            raise ValueError('only the type "json_object" takes a schema')
        return self

    @property
    def structured(self) -> StructuredOutputs | None:
        if self.json_schema is not None:
            return StructuredOutputs(json=self.json_schema.json_schema)
        if self.bare_schema is not None:
            return StructuredOutputs(json=self.bare_schema)
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


ToolName = Annotated[
    str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$", description="The name to call it by.")
]


class ToolFunction(StrictModel):
    """A function that an answer may call."""

    model_config = ConfigDict(extra="ignore")

    name: ToolName
    description: str = Field("", description="What it does, for the model.")
    parameters: SchemaObject = Field(default_factory=dict, description="A JSON schema.")
    strict: bool | None = Field(None, description="Arguments always follow their schema.")


class Tool(StrictModel):
    """A tool that an answer may use; only functions are supported."""

    type: Literal["function"]
    function: ToolFunction = Field(description="The function.")


class FunctionName(StrictModel):
    """A function among the tools."""

    name: str = Field(description="The function's name.")


class NamedTool(StrictModel):
    """The function that an answer must call."""

    type: Literal["function"] = "function"
    function: FunctionName = Field(description="The function to call.")


ToolChoice = Literal["none", "auto", "required"] | NamedTool
