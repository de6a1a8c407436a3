// The kernels of latent Dirichlet allocation (Hoffman et al. 2013, figure 6), once for each instruction set.
//
// A matrix of topics has one row for each word: `width` numbers, of which the first `topics` are used and the others
// are 0. width is a multiple of 16, so that rows consist of whole cache lines and whole registers.
#pragma once

#include <cstdint>

namespace murmurate {

struct Documents {
  int64_t count;
  const int64_t* starts;  // [count + 1]; words of document d are at starts[d] .. starts[d + 1]
  const int32_t* word;    // row of beta
  const float* times;     // how often the word occurs in the document
  int64_t longest;        // greatest number of distinct words of a document
};

struct TopicKernels {
  const char* name;
  // beta[r] <- exp(E[log beta of word row[r]]), up to a factor for each topic and a factor for each word:
  // exp(digamma(lambda) + 1 / greatest lambda of the row) * factor [width], where lambda = offset + scale * x
  void (*expected)(const float* x, int64_t width, int64_t topics, const int64_t* row, int64_t rows, float scale,
                   float offset, const float* factor, float* beta);
  // Iterates gamma [count, width] to its fixed point given beta, and adds the expected number of words of each topic
  // to statistics [rows of beta, width]. From column `topics` on, alpha and gamma must be less than in all columns
  // before it. Returns the total number of iterations of all documents.
  int64_t (*fold_in)(const Documents&, const float* beta, int64_t width, int64_t topics, const float* alpha,
                     int64_t iterations, float tolerance, float* work, float* gamma, float* statistics);
  // x[row[r]] += step * values[r]
  void (*add_rows)(float* x, int64_t width, const int64_t* row, int64_t rows, const float* values, float step);
};

extern const TopicKernels kTopicsPortable;
extern const TopicKernels kTopicsAvx2;
extern const TopicKernels kTopicsAvx512;

}  // namespace murmurate
