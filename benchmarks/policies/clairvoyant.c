/* The least cost of serving rows in batches where every arrival is known beforehand. See foreseen.py.

   A path serves the first k rows in order, in batches; of it only counts when the worker is free, and what it has cost. The
   next batch begins when the worker is free or its last row arrives, whichever is later: later would cost more. Of two paths
   to the same k, one that is free no sooner and has cost no less is dropped. Nothing else is, so the result is the optimum;
   `near` is only for rounding. */

#include <math.h>
#include <stdlib.h>

typedef struct { double free, cost; long from; int size; } Path;

static int sooner(const void *a, const void *b) {
    const Path *x = a, *y = b;
    if (x->free != y->free) return x->free > y->free ? 1 : -1;
    return (x->cost > y->cost) - (x->cost < y->cost);
}

/* Rows arrive at `arrivals`, in ms. `sizes` gets the batches' rows in the order of service, and their number is returned; -1
   where memory is short. */
long clairvoyant(long rows, const double *arrivals, int largest, const double *time, const double *energy, double near,
                 int *sizes) {
    long room = 1 << 16, used = 1, *first = malloc((rows + 2) * sizeof(long));
    long many = 1024;
    Path *paths = malloc(room * sizeof(Path)), *tried = malloc(many * sizeof(Path));
    double *sums = malloc((rows + 1) * sizeof(double));
    if (!first || !paths || !tried || !sums) return -1;
    sums[0] = 0.0;
    for (long i = 0; i < rows; i++) sums[i + 1] = sums[i] + (arrivals[i] - arrivals[0]);
    paths[0] = (Path){0.0, 0.0, -1, 0};
    first[0] = 0;
    first[1] = 1;
    for (long k = 1; k <= rows; k++) {
        long count = 0;
        for (int b = 1; b <= largest && b <= k; b++) {
            long low = first[k - b], high = first[k - b + 1];
            while (count + high - low > many) {
                Path *more = realloc(tried, 2 * many * sizeof(Path));
                if (!more) return -1;
                tried = more; many *= 2;
            }
            for (long from = low; from < high; from++) {
                double last = arrivals[k - 1] - arrivals[0];
                double end = (paths[from].free > last ? paths[from].free : last) + time[b - 1];
                double cost = paths[from].cost + b * end - (sums[k] - sums[k - b]) + energy[b - 1];
                /* free before the next row arrives is as good as free when it does */
                if (k < rows && end < arrivals[k] - arrivals[0]) end = arrivals[k] - arrivals[0];
                tried[count++] = (Path){end, cost, from, b};
            }
        }
        qsort(tried, count, sizeof(Path), sooner);
        if (used + count > room) {
            while (used + count > room) room *= 2;
            Path *more = realloc(paths, room * sizeof(Path));
            if (!more) return -1;
            paths = more;
        }
        double least = INFINITY;
        for (long i = 0; i < count; i++) {
            if (tried[i].cost < least - near) { paths[used++] = tried[i]; least = tried[i].cost; }
        }
        first[k + 1] = used;
    }
    long best = first[rows], batches = 0;
    for (long i = first[rows]; i < used; i++) if (paths[i].cost < paths[best].cost) best = i;
    for (long at = best; paths[at].from >= 0; at = paths[at].from) sizes[batches++] = paths[at].size;
    for (long i = 0; i < batches / 2; i++) { int x = sizes[i]; sizes[i] = sizes[batches - 1 - i]; sizes[batches - 1 - i] = x; }
    free(first); free(paths); free(tried); free(sums);
    return batches;
}
