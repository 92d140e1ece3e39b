"""The table's second half: SGLang's defaults that are slow or wrong on SM120 where the fix lies outside our kernels.

A row is on only where the stock default cannot start, or where it can change no number and its harm is on record; what
nobody has seen run on SM120 is off. One is on where a server tries it out: prompts_in_halves, by which numbers change
as by another chunk size. DSV4_SM120_SET turns each on or off; what the user sets himself, as a variable or as a server
argument, always stays. Sources: [R] read in SGLang's code, [M] measured by the named party, [I] inferred. None of it
was run on an SM120 card by us.
"""

from deepseek_v4_sm120.patching.spec import VALUE, Default

DECODE_STEPS_BETWEEN_CHUNKS = 8
CAPTURED_ROWS = 1024  # of a prefill pass in graphs, at most; on one card
HALF_ROWS = 2048  # of a prompt's half at least: fewer are soon bound by the host
DEALT_STREAMS = "dealt_streams"
INTERVAL, LOOKS = "SGLANG_GRAMMAR_POLL_INTERVAL", "SGLANG_GRAMMAR_MAX_POLL_ITERATIONS"
TRIED = 0  # no number: it is tried out
# whose originals have another order of sums for another number of rows; compressors have not, sums tell themselves
REPRODUCIBLE = (
    *("sparse_decode", "index_select", "mxfp4_moe", "fp8_linear", "wo_a", "bf16_linear", "mhc"),
    *("reproducible_head", "reproducible_sampling"),
)

DEFAULTS = (
    Default(
        name="reproducible",
        why="an answer's bits depend on the batch, on the chunks of its prompt and on what the prefix cache had: above "
        "a step's rows SGLang's kernels and ours add in other orders. On, our operators take decode's order at any "
        "number of rows, and the head is ours; prompts take longer (docs/notes/reproducible.md). The "
        "variable is for GPUs other than SM120, whose prompts have another attention",
        source="[R] the whole forward of 0.5.17 and 0.5.23; times by arithmetic",
        sglang=">=0.5.14,<0.6",
        on=False,
        how="no way without us",
        environment={"SGLANG_OPT_FLASHMLA_SPARSE_PREFILL": "0"},
    ),
    Default(
        name="dealt_index",
        why="every card scores all rows of a prompt's indexer. Dealt to the cards, whose lists are gathered then, a "
        "prompt of 128K tokens is reckoned to take a second of twelve less, with the same bits. Where that is reckoned "
        "not to pay, and outside of plain tensor parallelism, every card goes on as before",
        source="[R] all releases' indexers and groups; [M] by us, on two H200, in one run: 32,000 tokens 1,479 ms for "
        "1,534",
        sglang=">=0.5.13,<0.6",
        on=True,
        how="no way without us",
    ),
    Default(
        name="prompts_in_halves",
        why="the card idles while a prompt's rows are summed, twice a layer: 146 of a chunk's 577 ms over PCIe at two "
        "cards, by arithmetic. In two halves that take turns the sums of one run beside the products of the other, and "
        "the host launches twice as much: tried out by the server's first passes, unless a number says how many rows "
        "a half has at least. With a number passes in prefill graphs go so, too (0.5.23)",
        source="[R] all releases' batches, models and attention backends; [M] by us, on two H200 through host memory, "
        "0.5.23, the bits of whole passes: in graphs a chunk of 8,192 rows 397 ms for 550; without, whose host takes "
        "as long as the cards, 573 for 531, and passes of 32,000 rows 1,544 for 2,101",
        sglang=">=0.5.14,<0.6",
        on=True,
        on_in=">=0.5.23,<0.6",  # where cards have run it
        how="no way without us",
        value=TRIED,
    ),
    Default(
        name=DEALT_STREAMS,
        why="every card makes the boundaries of all rows of a prompt and keeps their streams, 32 KB a row. Dealt to "
        "the cards, with a reduce-scatter and an all-gather in place of each sum, each of the one to three sets of "
        "streams that a pass holds takes 134 MB less of 268 at two cards, 201 at four (8,192 rows). Faster over "
        "NVLink, slower through host memory. The same bits at two cards; above, NCCL may add in another order",
        source="[R] all releases' models, embeddings and groups; [M] by us, on two H200: 32,000 tokens 1,497 ms for "
        "1,527 over NVLink, 2,300 for 2,223 through host memory",
        sglang=">=0.5.13,<0.6",
        on=False,
        how="no way without us",
    ),
    Default(
        name="dealt_products",
        why="every card reads all of the compressors' bf16 weights in each step, 0.52 GB. Dealt to the cards, whose "
        "sums are gathered then in one launch a layer beside the queries' projections, a step is reckoned to take 0.16 "
        "ms less on two SM120, 0.24 on four, with the same bits. Off in a server that nobody planned; `plan` sets it "
        "on two cards: four have not run it",
        source="[R] all releases' streams and groups; [M] by us, on two H200: 3.67 ms a step for 3.70 at one stream, "
        "5.84 for 5.90 at eight, the same bits",
        sglang=">=0.5.14,<0.6",
        on=False,
        how="no way without us",
    ),
    Default(
        name="prefill_graphs",
        why="a pass of a thousand rows and fewer is bound by its launches and the host: 150 to 170 ms for a prompt of "
        "1,024 tokens on an H200, of which the GPU works some 95. SGLang's breakable graphs (attention runs between "
        "them) leave this model out for the memory of its index logits, of which ours has none. The number: the most "
        "rows of a pass that is captured. Off in a server that nobody planned: the graphs take a pass's scratch, "
        "reckoned 1.0 to 1.5 GB, from what --mem-fraction-static leaves. `plan` knows whether it is there, and sets it",
        source="[R] the runners of 0.5.17 and 0.5.23; [M] by us, on an H200: 99 ms for 147 at 1,024 tokens, 49 "
        "for 93 at 128, the same bits; on four H100 75 for 356 at 1,024",
        sglang=">=0.5.17,<0.6",
        on=False,
        how="--cuda-graph-backend-prefill breakable --cuda-graph-bs-prefill 8 16 32 .. 1024",
        value=CAPTURED_ROWS,
    ),
    Default(
        name="draft_head",
        why="a speculating server's drafts guess with a copy of the head in INT4, a quarter of the bytes, the best "
        "of them once more with the head: 0.48 ms of a step of some 8.3 of EAGLE 3/1/4 on an H200. The text is the "
        "model's own either way. Off in a server that nobody planned: the copy takes 0.28 GB, divided by the cards",
        source="[R] all releases' drafts; [M] by us, on an H200: 79 us a guess for 239, "
        "and of 500 calls in engines none guessed otherwise",
        sglang=">=0.5.14,<0.6",
        on=False,
        how="no way without us",
    ),
    Default(
        name="router_topk",
        why="the experts wait for the router's choice in 40 of 43 layers; SGLang's kernel lets them in at its end. "
        "Ours, with the same ids and weights to the bit, takes 1.0 to 1.4 us less of a layer in a chain of its kernels",
        source="[R] 0.5.15 to 0.5.23; [M] by us, engines of 0.5.23: four H200, eight streams 4.73 ms a step for 4.89 "
        "(slower of four rounds); two H200, one stream 4.00 for 4.07; one H200 no difference",
        sglang=">=0.5.15,<0.6",
        on=False,
        how="no way without us",
    ),
    Default(
        name="compiled_streams",
        why="a decode step forks index, compressors and keys to streams of their own. torch 2.11, which these releases "
        "pin, has no events in a compiled graph: who waits for one behind the graph's end, where ours are, waits for "
        "that of the trace, and the capture ends with 'dependency created on uncaptured work in another stream'. On, "
        "a step stays on one stream; no number changes",
        source="[R] models/deepseek_v4.py of 0.5.12 to 0.5.17 (its experts leave their side stream out under "
        "torch.compile, its attention does not); EventVariable of torch 2.11's Dynamo, of 2.13 with events by index; "
        "pytorch #109848, #188536; [M] by us, on an H200: 0.5.17 does not start without it, and with it gives the text "
        "that it gives uncompiled; 0.5.23 (torch 2.14) starts without",
        sglang=">=0.5.12,<0.5.18",
        on=True,
        how="SGLANG_OPT_USE_MULTI_STREAM_OVERLAP=0, or no --enable-torch-compile",
        environment={"SGLANG_OPT_USE_MULTI_STREAM_OVERLAP": "0"},
        only_with="enable_torch_compile",
    ),
    Default(
        name="grammar_looks",
        why="while a schema or a set of strict tools compiles, for 0.1 s to 34, the scheduler looks for it for 5 ms in "
        "front of each step of all streams, asleep between the looks. The steps that overlap hide what is left of the "
        "last one, so what is shorter than some 7 ms waits (docs/mended.md). On, it looks for 0.1 ms. A compilation is "
        "given up by the number of looks, so there are more: by reckoning an idle server waits as long as before or up "
        "to three times as long, a busy one longer",
        source="[R] GrammarManager and the loops of all releases, run with a clock of their own on the CPU; [M] by us, "
        "on two busy cores: XGrammar 0.2.7, DeepSeek-V4's vocabulary",
        sglang=">=0.5.12,<0.6",
        on=True,
        how=f"{INTERVAL} and {LOOKS} (an interval of 0 never looks)",
        environment={INTERVAL: "0.0001", LOOKS: "400000"},
        unless=((LOOKS, ()), (INTERVAL, ())),  # one goes by the other
    ),
    Default(
        name="start_on_sm120",
        why="0.5.12 has no SM120 branch: it takes DeepGEMM kernels that this GPU has no code for, and a top-k that "
        "wants more shared memory than it has; later releases set the same values themselves",
        source="[R] server_args.py of 0.5.14 sets them; deep_gemm 0.1.0 rejects the architecture",
        sglang=">=0.5.12,<0.5.13",
        on=True,
        how="set the variables yourself",
        environment={
            "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
            "SGLANG_OPT_DEEPGEMM_HC_PRENORM": "0",
            "SGLANG_OPT_USE_TILELANG_MHC_PRE": "0",
            "SGLANG_OPT_FP8_WO_A_GEMM": "0",
            "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1",
            "SGLANG_OPT_USE_TOPK_V2": "0",
        },
    ),
    Default(
        name="fp4_experts_marlin",
        why="0.5.12 gives packed FP4 experts to a kernel that asserts their width; Marlin's method keeps their bytes, "
        "and mxfp4_moe computes with them",
        source="[R] Fp8Config.get_quant_method of 0.5.12; 0.5.13 and later choose it themselves",
        sglang=">=0.5.12,<0.5.13",
        on=True,
        how="--moe-runner-backend",
        arguments={"moe_runner_backend": "marlin"},
        unless=(("SGLANG_DSV4_FP4_EXPERTS", ("0", "false", "no", "n", "f")),),
    ),
    Default(
        name="custom_all_reduce_v1",
        why="the second version wants NVLink, disables itself on PCIe and leaves NCCL: about 10 us more in each of 87 "
        "all-reduces of a step on 2 cards",
        source="[R] dispatch_custom_allreduce of 0.5.12; 0.5.13 and later fall back themselves",
        sglang=">=0.5.12,<0.5.13",
        on=True,
        how="SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2=1",
        environment={"SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0"},
    ),
    Default(
        name="prefill_decode_interval",
        why="a long prompt's chunks all run before the next token of anybody else: 2.3 tokens/s for 27 s was measured "
        "in one stack, 2.3 to 6.1 in another; with N, N decode steps run after each chunk",
        source="[R] Scheduler.get_next_batch_to_run; [M] Vercantez at 146K, jasl at 124K (vLLM, the same policy)",
        sglang=">=0.5.20,<0.6",
        on=True,
        how="--prefill-decode-interval N (0: SGLang's own order)",
        arguments={"prefill_decode_interval": VALUE},
        value=DECODE_STEPS_BETWEEN_CHUNKS,
        only_where=("nnodes", 1),  # each rank schedules by its own host's arguments: another host may be without us
    ),
    Default(
        name="prefill_decode_interval_0_5_17",
        why="a long prompt's chunks all run before the next token of anybody else, as in prefill_decode_interval's "
        "releases; this one lacks their argument, so our patch prefill_interval holds chunks back",
        source="[R] Scheduler.get_next_batch_to_run of 0.5.17",
        sglang=">=0.5.17,<0.5.18",
        on=False,
        how="DSV4_SM120_SET=prefill_decode_interval_0_5_17=8",
        value=DECODE_STEPS_BETWEEN_CHUNKS,
    ),
)
