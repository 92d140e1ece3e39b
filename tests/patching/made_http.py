"""What the made tree of conftest.py has of SGLang 0.5.17's APIs beside the chat API."""

RESPONSES = """
class OpenAIServingResponses:
    def __init__(self, tokenizer_manager, template_manager, *, tool_server=None):
        pass

    async def create_responses(self, request, raw_request=None):
        return request

    async def responses_full_generator(self, request, sampling_params, result_generator, context):
        return request

    async def responses_stream_generator_non_harmony(self, request, sampling_params, result_generator, model_name,
                                                     tokenizer, request_metadata, created_time=None, *,
                                                     require_reasoning):
        yield request
"""
MESSAGES = """
class AnthropicServing:
    def _convert_to_chat_completion_request(self, anthropic_request):
        return anthropic_request

    async def _generate_anthropic_stream(self, adapted_request, processed_request, anthropic_request, raw_request):
        yield adapted_request

    def _convert_response(self, response):
        return response
"""
