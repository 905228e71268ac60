/* The innermost loops of products.c and windows.c, for vectors of LANES numbers: included once for each width there is. The
 * compiler takes vectors that are wider than the processor's apart through memory, ten times as slowly. */
#define JOINED(name, lanes) name##lanes
#define JOIN(name, lanes) JOINED(name, lanes)
#define VECTOR JOIN(v, LANES)
#define WHOLE JOIN(whole, LANES)
#define COARSE JOIN(coarse, LANES)

typedef float VECTOR __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t WHOLE __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int16_t COARSE __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

/* rows x (LANES * vectors) of a product; a piece's numbers are `apart` from each other. coarse: B has scales. */
INLINE void JOIN(tile, LANES)(const int rows, const int vectors, const int64_t apart, const int coarse, const Product *x,
                              int64_t row, int64_t column) {
    const uint32_t *places = x->places + row * x->all;
    const char *B = (const char *)x->B + column * (coarse ? 2 : 4);
    float *to = x->to + row * x->across + column;
    VECTOR sum[12][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = *(const VECTOR *)((x->bias ? x->bias + column : to + r * x->across) + LANES * v);
    for (int64_t piece = 0; piece < x->pieces; piece++) {
        const float *at[12];
        for (int r = 0; r < rows; r++) at[r] = x->from + places[r * x->all + piece] * x->unit;
        for (int64_t k = 0; k < x->size; k++, B += x->panel * (coarse ? 2 : 4)) {
            VECTOR b[4];
            for (int v = 0; v < vectors; v++)
                b[v] = coarse ? __builtin_convertvector(((const COARSE *)B)[v], VECTOR) : ((const VECTOR *)B)[v];
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < vectors; v++) sum[r][v] += at[r][k * apart] * b[v];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            VECTOR y = sum[r][v];
            if (coarse && x->ends) y *= *(const VECTOR *)(x->scales + column + LANES * v);
            *(VECTOR *)(to + r * x->across + LANES * v) = x->ends ? (VECTOR)((WHOLE)y & (y > (VECTOR){0})) : y;
        }
}

INLINE void JOIN(tiles, LANES)(const int tall, const int vectors, const int64_t apart, const int coarse, const Product *x,
                               int64_t rows, int64_t columns) {
    for (int64_t column = 0; column < columns; column += LANES * vectors) {
        int64_t r = 0;
        for (; r + tall <= rows; r += tall) JOIN(tile, LANES)(tall, vectors, apart, coarse, x, r, column);
        if (tall > 8 && r + 8 <= rows) JOIN(tile, LANES)(8, vectors, apart, coarse, x, r, column), r += 8;
        if (tall > 4 && r + 4 <= rows) JOIN(tile, LANES)(4, vectors, apart, coarse, x, r, column), r += 4;
        for (; r + 2 <= rows; r += 2) JOIN(tile, LANES)(2, vectors, apart, coarse, x, r, column);
        if (r < rows) JOIN(tile, LANES)(1, vectors, apart, coarse, x, r, column);
    }
}

/* to [rows][LANES * vectors of outputs] += numbers of a piece of `count` windows, each times the window's gradient. */
INLINE void JOIN(collect, LANES)(const int rows, const int vectors, const float *from, const uint32_t *numbers,
                                 int64_t pieces, int64_t size, int64_t count, const float *gradient, int64_t outputs,
                                 float *to) {
    VECTOR sum[12][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sum[r][v] = *(const VECTOR *)(to + r * outputs + LANES * v);
    for (int64_t i = 0; i < count; i++, gradient += outputs) {
        const float *at = from + numbers[i * pieces] * size;
        VECTOR b[4];
        for (int v = 0; v < vectors; v++) b[v] = *(const VECTOR *)(gradient + LANES * v);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sum[r][v] += at[r] * b[v];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) *(VECTOR *)(to + r * outputs + LANES * v) = sum[r][v];
}

/* The same for all columns, and as many rows as there are from `from` on. */
INLINE void JOIN(collects, LANES)(const int rows, const int vectors, const float *from, const uint32_t *numbers,
                                  int64_t pieces, int64_t size, int64_t many, int64_t count, const float *gradient,
                                  int64_t outputs, float *to) {
    for (int64_t column = 0; column < outputs; column += LANES * vectors) {
        int64_t c = 0;
        for (; c + rows <= many; c += rows)
            JOIN(collect, LANES)(rows, vectors, from + c, numbers, pieces, size, count, gradient + column, outputs,
                                 to + c * outputs + column);
        for (; c < many; c += 2)
            JOIN(collect, LANES)(2, vectors, from + c, numbers, pieces, size, count, gradient + column, outputs,
                                 to + c * outputs + column);
    }
}

#undef JOINED
#undef JOIN
#undef VECTOR
#undef WHOLE
#undef COARSE
#undef LANES
