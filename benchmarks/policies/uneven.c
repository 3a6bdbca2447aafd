/* One model on two workers, in time steps: the least cost of any policy, or that of a given one. No code is shared with src.

   Service times are whole steps and constant; rows arrive by a Poisson law with the mean `rate` per step. A state is (i, j, q):
   the first worker is free after i steps, the second after j, and q rows wait. A row that waits costs 1 per step, a batch of b
   rows b times its steps, plus its energy. `first` and `second` are the batches, by the other worker's steps and rows waiting:
   read if `given`, else written. Returns the mean cost per row. */

#include <math.h>
#include <stdlib.h>

#define AT(values, i, j, q) values[((size_t)(i) * (slowest + 1) + (j)) * (most + 1) + (q)]
#define ARRIVALS 12

double uneven(int most, int largest, int longest, int slowest, const int *times, const int *others, double rate,
              const double *energies, int given, int *first, int *second, double precision) {
    size_t states = (size_t)(longest + 1) * (slowest + 1) * (most + 1);
    double *before = calloc(states, sizeof(double)), *after = calloc(states, sizeof(double));
    double law[ARRIVALS], chance = exp(-rate), rest = 1.0, mean = 0.0;
    for (int k = 0; k < ARRIVALS; k++) {
        law[k] = chance;
        rest -= chance;
        chance *= rate / (k + 1);
    }
    law[0] += rest;
    for (int sweep = 0; sweep < 100000; sweep++) {
        for (int i = 0; i <= longest; i++)
            for (int j = 0; j <= slowest; j++) {
                const double *from = &AT(before, i ? i - 1 : 0, j ? j - 1 : 0, 0);
                for (int q = 0; q <= most; q++) {
                    double sum = q;
                    for (int k = 0; k < ARRIVALS; k++)
                        sum += law[k] * from[q + k < most ? q + k : most];
                    AT(after, i, j, q) = sum;
                }
            }
        for (int q = 1; q <= most; q++) {
            for (int i = 1; i <= longest; i++) {
                int *chosen = &second[i * (most + 1) + q];
                double best = AT(after, i, 0, q);
                if (!given) *chosen = 0;
                for (int b = given ? *chosen : 1; b && b <= (given ? *chosen : q < largest ? q : largest); b++) {
                    double cost = b * others[b] + energies[1] * others[b] + AT(after, i, others[b], q - b);
                    if (given || cost < best - 1e-12) best = cost, *chosen = b;
                }
                AT(after, i, 0, q) = best;
            }
            for (int j = 1; j <= slowest; j++) {
                int *chosen = &first[j * (most + 1) + q];
                double best = AT(after, 0, j, q);
                if (!given) *chosen = 0;
                for (int b = given ? *chosen : 1; b && b <= (given ? *chosen : q < largest ? q : largest); b++) {
                    double cost = b * times[b] + energies[0] * times[b] + AT(after, times[b], j, q - b);
                    if (given || cost < best - 1e-12) best = cost, *chosen = b;
                }
                AT(after, 0, j, q) = best;
            }
        }
        for (int q = 1; q <= most; q++) { /* both are idle: what starts first changes which one is */
            double best = AT(after, 0, 0, q);
            int one = given ? first[q] : 0, other = given ? second[q] : 0;
            for (int b = 1; b <= q && b <= largest; b++) {
                double cost = b * times[b] + energies[0] * times[b] + AT(after, times[b], 0, q - b);
                if (given ? b == one : cost < best - 1e-12) best = cost, one = b, other = given ? other : 0;
                cost = b * others[b] + energies[1] * others[b] + AT(after, 0, others[b], q - b);
                if (given ? !one && b == other : cost < best - 1e-12) best = cost, other = b, one = given ? one : 0;
            }
            AT(after, 0, 0, q) = best;
            first[q] = one, second[q] = other;
        }
        double low = HUGE_VAL, high = -HUGE_VAL, origin = after[0];
        for (size_t n = 0; n < states; n++) {
            double gain = after[n] - before[n];
            if (gain < low) low = gain;
            if (gain > high) high = gain;
            before[n] = after[n] - origin;
        }
        mean = (low + high) / 2.0;
        if (high - low < precision * mean) break;
    }
    free(before);
    free(after);
    return mean / rate;
}
