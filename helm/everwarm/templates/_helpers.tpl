{{/* Names. A RayService's name may have 47 characters, and KubeRay derives every other name from it. */}}
{{- define "everwarm.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 47 | trimSuffix "-" -}}
{{- end -}}

{{- define "everwarm.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains (include "everwarm.name" .) .Release.Name -}}
{{- .Release.Name | trunc 47 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "everwarm.name" .) | trunc 47 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "everwarm.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "everwarm.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "everwarm.serveService" -}}
{{- if eq .Values.kind "RayService" -}}{{ include "everwarm.fullname" . }}-serve-svc
{{- else -}}{{ include "everwarm.fullname" . }}-head-svc{{- end -}}
{{- end -}}

{{- define "everwarm.cacheClaim" -}}
{{- if eq .Values.modelCache.type "existingClaim" -}}{{ .Values.modelCache.existingClaim }}
{{- else -}}{{ include "everwarm.fullname" . }}-models{{- end -}}
{{- end -}}

{{/* Labels. The pods' app.kubernetes.io/name is left to KubeRay, whose Services select by it; ray.io/cluster has a
random suffix. So everything of ours selects instance + component. */}}
{{- define "everwarm.selectorLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/part-of: {{ include "everwarm.name" . | quote }}
{{- end -}}

{{- define "everwarm.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
app.kubernetes.io/name: {{ include "everwarm.name" . | quote }}
{{ include "everwarm.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* metadata of an object: (dict "root" $ "name" "suffix or empty" "labels" (dict) "annotations" (dict)) */}}
{{- define "everwarm.metadata" -}}
name: {{ include "everwarm.fullname" .root }}{{ with .name }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "everwarm.labels" .root | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The worker groups that are switched on, as a map (a null entry in the values removes a group). */}}
{{- define "everwarm.groups" -}}
{{- $groups := dict -}}
{{- range $name, $group := .Values.workerGroups -}}
{{- if $group -}}{{- $_ := set $groups $name $group -}}{{- end -}}
{{- end -}}
{{- toYaml $groups -}}
{{- end -}}

{{- define "everwarm.minWorkers" -}}
{{- $sum := 0 -}}
{{- range $group := include "everwarm.groups" . | fromYaml -}}
{{- $sum = add $sum (include "everwarm.groupMin" $group) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}

{{- define "everwarm.groupMin" -}}
{{- if hasKey . "minReplicas" -}}{{ int .minReplicas }}{{- else -}}{{ int (.replicas | default 1) }}{{- end -}}
{{- end -}}

{{- define "everwarm.groupMax" -}}
{{- if hasKey . "maxReplicas" -}}{{ int .maxReplicas }}{{- else -}}{{ int (.replicas | default 1) }}{{- end -}}
{{- end -}}

{{/* Image reference: (dict "root" $ "override" (dict) "gpus" 0) */}}
{{- define "everwarm.image" -}}
{{- $image := merge (dict) (.override | default dict) .root.Values.image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- $flavour := ternary "cuda" "cpu" (gt (int .gpus) 0) -}}
{{- printf "%s:%s" $image.repository ($image.tag | default (printf "%s-%s" .root.Chart.AppVersion $flavour)) -}}
{{- end -}}
{{- end -}}

{{- define "everwarm.drainSeconds" -}}
{{- int (ceil (.Values.app.drain_timeout_s | float64)) -}}
{{- end -}}

{{- define "everwarm.tokenPlaneLow" -}}{{ (splitList "-" .Values.tokenPlane.ports) | first }}{{- end -}}
{{- define "everwarm.tokenPlaneHigh" -}}{{ (splitList "-" .Values.tokenPlane.ports) | last }}{{- end -}}

{{/* What a node may take to leave: replacements start, then streams get app.drain_timeout_s. The pods' grace period
lies above it. */}}
{{- define "everwarm.leaveSeconds" -}}{{ add (include "everwarm.drainSeconds" .) .Values.drain.replacementSeconds }}{{- end -}}
