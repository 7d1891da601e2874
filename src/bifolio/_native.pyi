"""Native CPU kernels of bifolio"""

def supported_isas() -> list[str]: ...

class Tape:
    def __len__(self) -> int: ...

class Runtime:
    def __init__(self, threads: int, isa: str) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def recording(self) -> bool: ...
    def start_recording(self) -> None: ...
    def stop_recording(self) -> Tape: ...
    def replay(self, tape: Tape) -> None: ...
    def gather(self, x: int, index: int, y: int, rows: int, h: int, ldx: int) -> None: ...
    def rope_store(
        self,
        qkv: int,
        q: int,
        positions: int,
        row_of_token: int,
        block_table: int,
        cos_sin: int,
        q_gain: int,
        k_gain: int,
        pool: int,
        page_bytes: int,
        layer_offset: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        kind: int,
        k_scales: int,
        v_scales: int,
        tokens: int,
        heads: int,
        table_width: int,
        rope_dim: int,
        q_eps: float,
        k_eps: float,
    ) -> None: ...
    def attention_workspace(
        self,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        tokens: int,
        heads: int,
        table_width: int,
    ) -> int: ...
    def attention(
        self,
        q: int,
        out: int,
        query_start: int,
        context_len: int,
        block_table: int,
        pool: int,
        page_bytes: int,
        layer_offset: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        kind: int,
        k_scales: int,
        v_scales: int,
        workspace: int,
        rows: int,
        tokens: int,
        heads: int,
        table_width: int,
        window: int,
        scale: float,
    ) -> None: ...
    def latent_attention_workspace(
        self, page_size: int, kv_lora: int, rope: int, tokens: int, heads: int, table_width: int
    ) -> int: ...
    def latent_attention(
        self,
        q: int,
        out: int,
        query_start: int,
        context_len: int,
        block_table: int,
        chosen: int,
        pool: int,
        page_bytes: int,
        layer_offset: int,
        page_size: int,
        kv_lora: int,
        rope: int,
        kind: int,
        scales: int,
        workspace: int,
        rows: int,
        tokens: int,
        heads: int,
        table_width: int,
        chosen_width: int,
        scale: float,
    ) -> None: ...
    def index_select_workspace(self, dim: int, heads: int, max_context: int) -> int: ...
    def index_select(
        self,
        q: int,
        weights: int,
        query_start: int,
        context_len: int,
        block_table: int,
        chosen: int,
        pool: int,
        page_bytes: int,
        index_offset: int,
        page_size: int,
        dim: int,
        kind: int,
        workspace: int,
        rows: int,
        tokens: int,
        heads: int,
        table_width: int,
        width: int,
        top_k: int,
        max_context: int,
        scale: float,
    ) -> None: ...
    def pack(
        self,
        layout: WeightLayout,
        codes: int,
        scales: int,
        offsets: int,
        scale_stride: int,
        packed: int,
    ) -> None: ...
    def embedding(self, layout: WeightLayout, packed: int, ids: int, y: int, t: int) -> None: ...
    def linear(
        self,
        layout: WeightLayout,
        packed: int,
        x: int,
        gain: int,
        bias: int,
        residual: int,
        order: int,
        y: int,
        workspace: int,
        t: int,
        eps: float,
    ) -> None: ...
    def linear_workspace(self, layout: WeightLayout, t: int) -> int: ...
    def greedy(self, logits: int, tokens: int, rows: int, vocab: int, stride: int) -> None: ...
    def draw_workspace(self, vocab: int) -> int: ...
    def draw(
        self, rows: int, rules: int, tokens: int, workspace: int, count: int, vocab: int
    ) -> None: ...
    def logprobs(
        self, logits: int, logprobs: int, ids: int, vocab: int, token: int, top: int
    ) -> None: ...
    def page_check(
        self,
        block_table: int,
        table_width: int,
        counts: int,
        pages: int,
        tags: int,
        pool: int,
        page_bytes: int,
        pool_pages: int,
        rows: int,
        wrong: int,
        found: int,
        faults: int,
    ) -> None: ...
    def seal(
        self, data: int, stride: int, bytes: int, index: int, count: int, digests: int
    ) -> None: ...
    def convert_pages(
        self,
        source: int,
        target: int,
        source_index: int,
        target_index: int,
        source_k_scales: int,
        source_v_scales: int,
        target_k_scales: int,
        target_v_scales: int,
        count: int,
        layers: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        source_kind: int,
        source_page_bytes: int,
        source_layer_offset: int,
        source_layer_bytes: int,
        target_kind: int,
        target_page_bytes: int,
        target_layer_offset: int,
        target_layer_bytes: int,
    ) -> None: ...
    def read_probe(self, data: int, bytes: int, sink: int) -> None: ...
    def peak_probe(self, product: int, repeats: int, operations: int, sink: int) -> None: ...

class WeightLayout:
    def __init__(
        self,
        n: int,
        k: int,
        group: int,
        codes: str,
        scales: str,
        offsets: bool,
        zeros: bool,
        int8_activations: bool,
        gated: bool,
    ) -> None: ...
    @property
    def packed_bytes(self) -> int: ...
